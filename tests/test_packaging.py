"""The archives that users install hold the real files behind the links, and nothing of the workshop."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lang", "runtime", "radix", "kernels")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The file names in (sdist, wheel), the wheel built from the sdist, without the network."""
    out = tmp_path_factory.mktemp("dist")
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(out),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as tar:
        links = [member.name for member in tar.getmembers() if member.issym() or member.islnk()]
        assert not links, "links in the sdist lead nowhere"
        source_names = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        return source_names, set(archive.namelist())


def files_of_packages() -> set[str]:
    modules = {
        f"niwaki/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    model = ROOT / "runtime" / "bundled" / "niwaki-tiny"
    data = {f"niwaki/{path.relative_to(ROOT)}" for path in model.iterdir() if path.is_file()}
    page = ROOT / "runtime" / "server" / "page"
    data |= {f"niwaki/{path.relative_to(ROOT)}" for path in page.iterdir() if path.is_file()}
    face = ("__init__.py", "__main__.py", "mypy.py", "run_command.py", "py.typed")
    return modules | data | {f"niwaki/{name}" for name in face}


def test_the_wheel_holds_every_module_the_model_and_nothing_else(archives: tuple[set[str], set[str]]) -> None:
    _, wheel = archives
    assert {name for name in wheel if ".dist-info/" not in name} == files_of_packages()


def test_the_wheel_carries_its_license(archives: tuple[set[str], set[str]]) -> None:
    _, wheel = archives
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_the_sdist_holds_the_package_the_examples_and_the_pins(archives: tuple[set[str], set[str]]) -> None:
    source, _ = archives
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    data = {f"examples/data/{path.name}" for path in (ROOT / "examples" / "data").iterdir()}
    assert files_of_packages() | examples | data <= source
    assert {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md"} <= source
    assert not [name for name in source if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_every_pin_is_exact_and_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin and "+" not in pin and "/" not in pin for pin in pins)  # no local builds, no addresses
    names = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert len(names) == len(pins)
    assert {"torch", "numpy", "numba", "safetensors", "tokenizers", "pydantic", "pytest", "mypy", "ruff"} <= names


# What a torch of the package index pins; builds for CPUs alone, as the one here may be, pin no Triton. Who changes the
# pin of torch looks it up: pip download --no-deps torch==VERSION, METADATA in the wheel.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_triton_is_the_one_that_the_torch_of_the_index_pins() -> None:
    """Else nothing can be installed under the constraints on Linux, but where a build for CPUs lies at hand."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["triton"] == TRITON_OF_TORCH[pins["torch"]]


# Modules that come with a distribution of another name, or with one that cannot be without them.
DISTRIBUTION_OF = {
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
    "outlines_core": "outlines-core",
    "llvmlite": "numba",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-sdk",
}


OF_DEVELOPERS = ("dev", "docs", "bench", "rag")  # the last one is of an example
# SQLAlchemy and OpenTelemetry load these when an address or a variable names them.
LOADED_BY_NAME = ("psycopg", "opentelemetry-exporter-otlp-proto-http")


def test_what_the_package_imports_is_what_it_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {dependency.split(">=")[0] for dependency in project["dependencies"]}
    extras = {name: found for name, found in project["optional-dependencies"].items() if name not in OF_DEVELOPERS}
    optional = {re.split(r"[>=\[]", dependency)[0] for found in extras.values() for dependency in found}
    optional -= {"niwaki", *LOADED_BY_NAME}
    imported: set[str] = set()
    for package in (*PACKAGES, "niwaki"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    names = [node.module]
                imported |= {name.split(".")[0] for name in names}
    third_party = imported - set(sys.stdlib_module_names) - {"niwaki", "mypy"}  # mypy loads its plugin itself
    used = {DISTRIBUTION_OF.get(name, name) for name in third_party}
    assert used == needed | optional
