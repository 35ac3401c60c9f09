"""Whether an installation gets torch, and which build: `make -n` for the choice, fake wheels on a local index else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "install_torch.py"
VERSION = "2.13.0"
NVIDIA_SMI = '#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: GPU-0)"\n'
BROKEN_NVIDIA_SMI = '#!/bin/sh\necho "NVIDIA-SMI has failed because it could not communicate with the driver"\nexit 9\n'
UV = """
import pathlib, subprocess, sys
pathlib.Path(__file__).with_name("called").write_text(" ".join(sys.argv[1:]))
python = sys.argv[sys.argv.index("--python") + 1]
pip = [{pip!r}, "-m", "pip", "--python", python, "install", "--quiet", "--index-url", {index!r}]
sys.exit(subprocess.run([*pip, sys.argv[-1]]).returncode)
"""
"""Stands in for uv: installs its last argument from the index that plays PyTorch's."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default index has CPU builds only")


# --- the choice -------------------------------------------------------------------------------------------------------


def chosen_by_make(
    folder: Path, *, nvidia_smi: str | None = None, installed: str = "", torch: str = "", target: str = "serve"
) -> str:
    """The build that `make` would install into an environment that has (or has not) one; none: no torch."""
    tools = folder / "bin"
    tools.mkdir()
    if nvidia_smi is not None:
        (tools / "nvidia-smi").write_text(nvidia_smi)
        (tools / "nvidia-smi").chmod(0o755)
    if installed:
        (folder / "venv").mkdir()
        (folder / "venv" / f".torch-{installed}").touch()
        os.utime(folder / "venv" / f".torch-{installed}", (0, 0))  # older than constraints.txt: the rule runs
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TORCH": torch}
    environment.pop("MAKEFLAGS", None)  # of a make that runs these tests
    command = ["make", "-n", target, f"VENV={folder / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return next(iter(re.findall(r"install_torch\.py (\S+)", done.stdout)), "none")


@pytest.mark.parametrize(
    ("nvidia_smi", "installed", "torch", "build"),
    [
        pytest.param(NVIDIA_SMI, "", "", "cuda", id="gpu"),
        pytest.param(NVIDIA_SMI, "", "cpu", "cpu", id="gpu-TORCH=cpu"),
        pytest.param(NVIDIA_SMI, "cpu", "", "cpu", id="gpu-cpu-installed"),
        pytest.param(NVIDIA_SMI, "cpu", "cuda", "cuda", id="gpu-cpu-installed-TORCH=cuda"),
        pytest.param(BROKEN_NVIDIA_SMI, "", "cuda", "cuda", id="TORCH=cuda"),
        pytest.param(None, "cuda", "", "cuda", id="cuda-installed"),
        pytest.param(NVIDIA_SMI, "", "none", "none", id="gpu-TORCH=none"),
        pytest.param(BROKEN_NVIDIA_SMI, "", "cpu", "cpu", id="TORCH=cpu"),
    ],
)
def test_21_9_make_chooses_the_build_of_torch(
    tmp_path: Path, nvidia_smi: str | None, installed: str, torch: str, build: str
) -> None:
    assert chosen_by_make(tmp_path, nvidia_smi=nvidia_smi, installed=installed, torch=torch) == build


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="this machine has an NVIDIA GPU")
@pytest.mark.parametrize(("target", "build"), [("serve", "none"), ("test", "cpu")])
def test_21_9_without_a_gpu_only_tests_install_torch(target: str, build: str, tmp_path: Path) -> None:
    assert chosen_by_make(tmp_path, nvidia_smi=BROKEN_NVIDIA_SMI, target=target) == build


def test_21_9_make_rejects_an_unknown_build() -> None:
    done = subprocess.run(["make", "-n", "serve", "TORCH=gpu"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert 'TORCH is "gpu"; it must be none, cpu or cuda' in done.stderr


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="a source distribution has no CI")
def test_public_ci_runs_what_ours_runs() -> None:
    ours = re.findall(
        r"^((?:make|python3|\.venv/bin/python) .*)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE
    )
    theirs = re.findall(r"- run: (.*)$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), flags=re.MULTILINE)
    assert len(ours) > 5
    assert set(ours) <= set(theirs)


def test_make_compiles_for_this_machine_beside_pip_and_all_variants_for_tests() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"} | {"TORCH": "none"}
    command = ["make", "-n", "VENV=nowhere", "--always-make"]
    steps = [
        subprocess.run([*command, target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        for target in ("serve", "test-light")
    ]
    assert re.search(r"--jobs=2 \S+libtokenmill.so nowhere/.packages", steps[0])
    assert "build.py --native" in steps[0]
    assert "TOKENMILL_PURE=1 nowhere/bin/python -m pip" in steps[0]
    assert "TOKENMILL_PURE" not in steps[1]
    assert "--native" not in steps[1]


# --- what is installed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """An empty environment, and an index that stands for the public one."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (folder,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return folder

    def publish(self, index: str, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
        """A wheel on an index of this machine."""
        folder = self.folder / index / name
        folder.mkdir(parents=True, exist_ok=True)
        package = name.replace("-", "_")
        info = f"{package}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files = {
            **files,
            f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        wheel = folder / f"{package}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(path, text)
        links = (f'<a href="{one.name.replace("+", "%2B")}">{one.name}</a>' for one in folder.glob("*.whl"))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")

    def publish_torch(self, index: str, *, suffix: str = "", cuda: str | None = None) -> None:
        files = {"torch/version.py": f"__version__ = {VERSION + suffix!r}\ncuda = {cuda!r}\n"}
        self.publish(index, "torch", VERSION + suffix, files, "nvidia-cublas" if cuda else "")

    def address(self, index: str) -> str:
        return (self.folder / index).as_uri()

    def install(self, build: str, *, torch_index: str = "") -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "TORCH"))}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.address("public")}
        if torch_index:
            environment["TORCH_INDEX"] = self.address(torch_index)
        command = [sys.executable, str(SCRIPT), build, "--python", str(self.python)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    @property
    def packages(self) -> list[str]:
        return sorted(folder.name.removesuffix(".dist-info") for folder in self.site_packages.glob("*.dist-info"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The public index has torch as a CUDA build only, as it does for Linux; PyTorch's has a CPU build."""
    venv.create(tmp_path / "venv", with_pip=False)
    made = Machine(tmp_path)
    made.publish_torch("public", cuda="13.0")
    made.publish("public", "nvidia-cublas", "13.1", {"nvidia/cublas/lib.so": "x" * 50_000_000})
    made.publish_torch("pytorch", suffix="+cpu")
    return made


@linux
def test_21_9_the_cpu_build_is_never_the_default_index_s_cuda_build(machine: Machine) -> None:
    uv = UV.format(pip=sys.executable, index=machine.address("pytorch"))
    machine.publish("public", "uv", "0.13.7", {"uv/__main__.py": uv})
    done = machine.install("cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"torch {VERSION}+cpu (CPU build, 0.0 GB)\n")
    assert machine.packages == [f"torch-{VERSION}+cpu", "uv-0.13.7"]
    called = (machine.site_packages / "uv" / "called").read_text()
    assert f"--torch-backend=cpu torch=={VERSION}+cpu" in called


@linux
def test_21_9_without_a_cpu_build_nothing_is_installed_and_the_error_says_what_to_set(machine: Machine) -> None:
    machine.publish("public", "uv", "0.13.7", {"uv/__main__.py": "raise SystemExit('no network')"})
    done = machine.install("cpu")
    assert done.returncode == 1
    assert "no network" in done.stderr
    assert "Set TORCH_INDEX to the index URL that https://pytorch.org/get-started/locally shows" in done.stderr
    assert machine.packages == ["uv-0.13.7"]


@linux
def test_21_9_torch_index_names_where_the_cpu_build_is(machine: Machine) -> None:
    done = machine.install("cpu", torch_index="pytorch")
    assert done.returncode == 0, done.stderr
    assert machine.packages == [f"torch-{VERSION}+cpu"]


@linux
def test_21_9_an_index_without_the_cpu_build_is_an_error(machine: Machine) -> None:
    done = machine.install("cpu", torch_index="mistyped")
    assert done.returncode == 1
    assert "Set TORCH_INDEX" in done.stderr
    assert not machine.packages


@linux
def test_21_9_another_choice_replaces_the_build_with_all_its_packages(machine: Machine) -> None:
    machine.publish_torch("public", suffix="+cpu")  # both builds on one index: the suffix would be preferred
    done = machine.install("cuda")
    assert done.stdout.endswith(f"torch {VERSION} (CUDA build, 0.1 GB)\n"), done.stderr
    assert machine.packages == ["nvidia_cublas-13.1", f"torch-{VERSION}"]
    done = machine.install("cpu")
    assert done.stdout.endswith(f"torch {VERSION}+cpu (CPU build, 0.0 GB)\n"), done.stderr
    assert machine.packages == [f"torch-{VERSION}+cpu"]
    assert machine.install("cpu").stdout == f"torch {VERSION}+cpu (CPU build, 0.0 GB)\n"  # nothing left to do


def test_21_9_a_wrong_build_is_reported(machine: Machine) -> None:
    shutil.rmtree(machine.folder / "public" / "torch")
    machine.publish_torch("public")  # a CPU build without its suffix
    done = machine.install("cuda")
    assert done.returncode == 1
    assert f"torch {VERSION}, a cpu build, was installed instead" in done.stderr
    assert "or TORCH=cpu" in done.stderr


def test_21_9_the_pages_name_the_pinned_version_and_a_build() -> None:
    """An install by the README alone takes the build that the command names."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned is not None
    assert pinned.group(1) == VERSION
    for page in (ROOT / "README.md", ROOT / "docs" / "install.md"):
        text = page.read_text()
        commands = re.findall(r"pip install -c constraints\.txt.*", text)
        assert any("torch" not in command for command in commands), page.name
        with_torch = [command for command in commands if "torch]" in command]
        assert with_torch
        assert all(f"torch=={VERSION}" in command for command in with_torch), page.name
        assert set(re.findall(r"torch==(\d[\w.]*)", text)) == {VERSION}
