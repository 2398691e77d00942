"""The project as it is installed: metadata, lock file, the search for a Python, sdist and wheel."""

import configparser
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# Folder in the repository -> folder where the wheel puts it.
FOLDERS = {"k3_jax": "k3_jax", "pallas_kernels": "pallas_kernels", "configs": "k3_jax/configs"}
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(text: str) -> list[str]:
    """The entries of a multi-line setup.cfg value, without comments."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def direct_requirements(setup_cfg: configparser.ConfigParser) -> list[Requirement]:
    texts = [setup_cfg["options"]["install_requires"], *setup_cfg["options.extras_require"].values()]
    return [Requirement(line) for text in texts for line in listed(text)]


def locked() -> dict[str, Requirement]:
    lines = listed((ROOT / "requirements.lock").read_text())
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def version_of(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    return specifier.version


class TestLock:
    def test_every_version_is_exact(self):
        for name, requirement in locked().items():
            assert [s.operator for s in requirement.specifier] == ["=="], name

    def test_versions_are_within_the_ranges_of_setup_cfg(self, setup_cfg):
        lock = locked()
        for requirement in direct_requirements(setup_cfg):
            name = canonicalize_name(requirement.name)
            assert name in lock, f"{name} of setup.cfg is not in requirements.lock"
            version = version_of(lock[name])
            assert requirement.specifier.contains(version), f"{name}=={version} is outside {requirement.specifier}"

    def test_it_holds_what_the_requirements_need_and_nothing_else(self, setup_cfg):
        """Walks the installed packages' own requirements, which are the lock's where `make` installed them."""
        needed, queue = set(), direct_requirements(setup_cfg)
        while queue:
            requirement = queue.pop()
            name = canonicalize_name(requirement.name)
            key = (name, frozenset(requirement.extras))
            if key in needed:
                continue
            needed.add(key)
            try:
                children = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                pytest.skip(f"{name} is not installed: this environment does not come from requirements.lock")
            for child in map(Requirement, children):
                extras = requirement.extras | {""}
                if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                    queue.append(child)
        assert {name for name, _ in needed} == set(locked())


def test_python_versions_agree(setup_cfg):
    assert setup_cfg["options"]["python_requires"] == ">=3.12"


def test_packages_of_setup_cfg_are_the_folders(setup_cfg):
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in ("k3_jax", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert set(listed(setup_cfg["options"]["packages"])) == folders | {"k3_jax.configs"}
    for folder in folders:
        assert (ROOT / folder.replace(".", "/") / "__init__.py").exists(), f"{folder} has no __init__.py"


class TestFindPython:
    """`.ci/find-python` with a PATH and a HOME of our own."""

    @pytest.fixture
    def find(self, tmp_path):
        def run(**environment: str) -> subprocess.CompletedProcess:
            base = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
            command = ["/bin/sh", str(ROOT / ".ci" / "find-python")]
            return subprocess.run(command, cwd=tmp_path, env=base | environment, capture_output=True, text=True)

        (tmp_path / "bin").mkdir()
        return run

    @staticmethod
    def executable(path: Path, body: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    @pytest.fixture
    def working(self) -> str:
        """The body of a script that behaves as this Python (a link would lose its environment)."""
        return f'exec "{sys.executable}" "$@"'

    def test_a_shim_that_does_not_work_is_passed_over(self, find, tmp_path, working):
        self.executable(tmp_path / "bin" / "python3.13", "echo 'command not found' >&2; exit 127")
        second = self.executable(tmp_path / "second" / "python3.13", working)
        found = find(PATH=f"{tmp_path / 'bin'}:{tmp_path / 'second'}")
        assert (found.returncode, found.stdout) == (0, f"{second}\n")

    def test_an_older_python_is_passed_over(self, find, tmp_path, working):
        self.executable(tmp_path / "bin" / "python3", "exit 1 # what the version check of 3.11 answers")
        inside = self.executable(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", working)
        found = find()
        assert (found.returncode, found.stdout) == (0, f"{inside}\n")

    def test_the_variable_wins_and_must_work(self, find, tmp_path, working):
        self.executable(tmp_path / "bin" / "python3.12", working)
        named = self.executable(tmp_path / "my python", working)
        assert find(PYTHON=named).stdout == f"{named}\n"
        broken = find(PYTHON="/nowhere/python")
        assert (broken.returncode, broken.stdout) == (1, "")
        assert broken.stderr == "PYTHON=/nowhere/python: expected a working Python >= 3.12 with the venv module\n"

    def test_uv_is_asked_last(self, find, tmp_path, working):
        managed = self.executable(tmp_path / "managed" / "python", working)
        self.executable(tmp_path / "bin" / "uv", f'[ "$1 $2" != "python find" ] || echo "{managed}"')
        found = find()
        assert (found.returncode, found.stdout) == (0, f"{managed}\n")

    def test_none_at_all_says_what_to_install_in_one_line(self, find):
        none = find()
        assert (none.returncode, none.stdout) == (1, "")
        assert none.stderr.startswith("no working Python >= 3.12: install one")
        assert none.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist; nothing is written into the checkout."""
    pytest.importorskip("setuptools", reason="needs setuptools (in requirements.lock) to build without the network")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The wheel installed away from the checkout and from this environment's own copy."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def run_installed(site: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


class TestWheel:
    def test_wheel_and_sdist_hold_every_module_and_recipe(self, built):
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        in_wheel = set(zipfile.ZipFile(wheel).namelist())
        with tarfile.open(sdist) as archive:
            in_sdist = {name.partition("/")[2] for name in archive.getnames()}
        for folder, target in FOLDERS.items():
            for path in (ROOT / folder).rglob("*.py"):
                inside = path.relative_to(ROOT / folder).as_posix()
                assert f"{target}/{inside}" in in_wheel
                assert f"{folder}/{inside}" in in_sdist
        assert {"LICENSE", "NOTICE", "README.md"} <= in_sdist
        assert {name.rpartition("/")[2] for name in in_wheel if "/licenses/" in name} == {"LICENSE", "NOTICE"}

    def test_the_command_runs_from_it(self, installed):
        done = run_installed(installed, "k3", "--help")
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout

    def test_modules_and_recipes_are_the_installed_ones(self, installed):
        program = (
            "import pathlib, k3_jax, pallas_kernels; folder = pathlib.Path(k3_jax.__file__).parent;"
            "print(folder); print(pathlib.Path(pallas_kernels.__file__).parent.parent);"
            "print((folder / 'configs' / 'tiny.py').exists())"
        )
        done = run_installed(installed, sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(installed / "k3_jax"), str(installed), "True"]

    def test_a_shipped_recipe_is_found_away_from_the_repository(self, installed):
        done = run_installed(installed, "k3", "plan", "--config", "configs/tiny.py", "--parameters", "--json")
        assert done.returncode == 0, done.stderr
        assert '"total"' in done.stdout
