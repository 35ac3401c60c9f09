#!/bin/sh
# The tests of the CPU kernels on ARM: a cross-compiled library under qemu's user emulation, with Debian's Python for arm64
# and wheels for it in .arm. Once on a processor with dot products (the NEON kernels), once on one without (the plain ones).
set -e
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
ARM=.arm
PACKAGES="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libexpat1 zlib1g libssl3 libffi8 libgcc-s1
    libstdc++6 liblzma5 libbz2-1.0 libsqlite3-0 libuuid1 libcrypt1"
as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"

if ! command -v aarch64-linux-gnu-gcc >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    command -v apt-get >/dev/null || { echo "needs aarch64-linux-gnu-gcc and qemu-aarch64" >&2; exit 3; }
    echo "fetching a cross compiler and qemu"
    $as_root apt-get update -qq
    $as_root apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null
fi
if [ ! -e $ARM/.done ]; then
    echo "setting up $ARM: Python and packages for arm64"
    rm -rf $ARM && mkdir -p $ARM/debs $ARM/root
    $as_root dpkg --add-architecture arm64
    $as_root apt-get update -qq
    (cd $ARM/debs && apt-get download -qq $(printf '%s:arm64 ' $PACKAGES) 2>/dev/null)
    for package in $ARM/debs/*.deb; do dpkg-deb -x "$package" $ARM/root; done
    $PYTHON -m pip install --quiet --disable-pip-version-check -c constraints.txt --target $ARM/site \
        --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all: \
        numpy pytest hypothesis gguf safetensors tokenizers jinja2
    touch $ARM/.done
fi
rm -rf $ARM/src && cp -r src $ARM/src
CC=aarch64-linux-gnu-gcc $PYTHON $ARM/src/tokenmill/backends/cpu/build.py
export PYTHONPATH="$ARM/src:$ARM/site" PYTHONDONTWRITEBYTECODE=1
for cpu in max cortex-a72; do
    echo "kernels on $cpu"
    qemu-aarch64 -cpu $cpu -L $ARM/root $ARM/root/usr/bin/python3.11 -m pytest -q -p no:cacheprovider \
        tests/native/test_kernels.py tests/native/test_sampler.py -k "not planted" "$@"
done
