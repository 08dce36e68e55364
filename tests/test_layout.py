"""The map holds: imports go down only, no code comes out of data, and niwaki/ is a face with four links."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lang", "runtime", "radix", "kernels")
FACE = {"__init__.py", "__main__.py", "mypy.py", "run_command.py", "py.typed"}

SEAM = tuple(f"niwaki.runtime.{module}" for module in ("api", "constraints.schema", "pictures.picture"))
# The rooms of the runtime, from below upwards: one knows those before it alone.
ROOMS = (
    "api",
    "constraints",
    "options",
    "models",
    "checkpoint",
    "pictures",
    "sampling",
    "forward",
    "requests",
    "kv",
    "loop",
    "host",
    "engine",
    "bundled",
    "link",
    "replicas",
    "server",
)
# package -> (what of niwaki it may import, third-party packages that it may import; None: any)
RULES: dict[str, tuple[tuple[str, ...], frozenset[str] | None]] = {
    "lang": (
        ("niwaki.lang", *SEAM),
        frozenset({"openai", "pydantic", "pydantic_core", "pyarrow", "tqdm", "typing_extensions"}),
    ),
    "runtime": (("niwaki.runtime", "niwaki.radix", "niwaki.kernels"), None),
    "radix": (("niwaki.radix",), frozenset({"numpy"})),
    "kernels": (("niwaki.kernels",), frozenset({"torch", "numpy", "numba", "llvmlite", "triton"})),
}

BANNED_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
BANNED_CALLS = ("eval", "exec", "compile", "__import__")
BANNED_ATTRIBUTES = (("torch", "load"), ("os", "system"), ("os", "popen"))
BANNED_KEYWORDS = (("trust_remote_code", True), ("shell", True), ("weights_only", False))


def python_files(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, under TYPE_CHECKING and inside functions too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, "." * level  # relative: refused below


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def faults_of_imports(package: str, source: str) -> list[str]:
    own, third_party = RULES[package]
    faults = []
    for line, name in imports(ast.parse(source)):
        top = name.split(".")[0]
        if name.startswith("."):
            faults.append(f"{line}: a relative import")
        elif top in PACKAGES:
            faults.append(f"{line}: {name} without niwaki. before it")
        elif top == "niwaki":
            if not any(is_inside(name, allowed) for allowed in own) and name != "niwaki.__version__":
                faults.append(f"{line}: {name} is not below {package}")
        elif top not in sys.stdlib_module_names and third_party is not None and top not in third_party:
            faults.append(f"{line}: {package} does not know {top}")
    return faults


def faults_of_safety(source: str) -> list[str]:
    faults = []
    tree = ast.parse(source)
    for line, name in imports(tree):
        if name.split(".")[0] in BANNED_MODULES or name in ("torch.load", "builtins.eval", "builtins.exec"):
            faults.append(f"{line}: imports {name}")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in BANNED_CALLS:
                faults.append(f"{node.lineno}: calls {name}()")
            case ast.Attribute(value=ast.Name(id=module), attr=attribute) if (module, attribute) in BANNED_ATTRIBUTES:
                faults.append(f"{node.lineno}: uses {module}.{attribute}")
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if (name, value) in BANNED_KEYWORDS:
                faults.append(f"{node.lineno}: passes {name}={value!r}")
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_only(package: str) -> None:
    files = python_files(package)
    assert files
    faults = {str(path.relative_to(ROOT)): faults_of_imports(package, path.read_text("utf-8")) for path in files}
    assert not {path: found for path, found in faults.items() if found}


def faults_of_rooms(room: str, source: str) -> list[str]:
    known = ROOMS[: ROOMS.index(room) + 1]
    found = [(line, name.split(".")) for line, name in imports(ast.parse(source)) if is_inside(name, "niwaki.runtime")]
    return [f"{line}: {'.'.join(parts)}" for line, parts in found if parts[2:] and parts[2] not in known]


def test_rooms_of_the_runtime_know_those_below_them_alone() -> None:
    faults = {}
    for path in python_files("runtime"):
        room = path.relative_to(ROOT / "runtime").parts[0].removesuffix(".py")
        if room != "__init__":
            faults[str(path)] = faults_of_rooms(room, path.read_text("utf-8"))
    assert not {path: found for path, found in faults.items() if found}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("kv", "from niwaki.runtime.loop.core import EngineCore"),
        ("api", "from niwaki.runtime import engine"),
        ("bundled", "def f():\n    import niwaki.runtime.server.serve"),
    ],
)
def test_the_rule_of_rooms_sees_a_breach(room: str, line: str) -> None:
    assert faults_of_rooms(room, line)
    assert not faults_of_rooms("server", line)


def test_no_code_comes_out_of_data() -> None:
    files = [path for package in (*PACKAGES, "niwaki", "examples") for path in python_files(package)]
    faults = {str(path.relative_to(ROOT)): faults_of_safety(path.read_text("utf-8")) for path in files}
    assert not {path: found for path, found in faults.items() if found}


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("lang", "import torch"),
        ("lang", "from niwaki.runtime.engine import Engine"),
        ("lang", "from niwaki.runtime import api, engine"),
        ("lang", "from . import state"),
        ("runtime", "from niwaki.lang.state import State"),
        ("runtime", "import niwaki"),
        ("radix", "import torch"),
        ("radix", "from niwaki.runtime.api import NiwakiError"),
        ("kernels", "from niwaki.radix.cache import Cache"),
        ("kernels", "import transformers"),
        ("runtime", "import " + "kernels.ops"),
        ("lang", "def f():\n    if True:\n        from niwaki.kernels import ops"),
    ],
)
def test_the_import_rule_sees_a_breach(package: str, line: str) -> None:
    assert faults_of_imports(package, line)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "exec(code)",
        "torch.load(path)",
        "from torch import load",
        "from_pretrained(path, trust_remote_code=True)",
        "run(command, shell=True)",
        "os.system('ls')",
    ],
)
def test_the_safety_rule_sees_a_breach(line: str) -> None:
    assert faults_of_safety(line)


@pytest.mark.parametrize("line", ["model.eval()", "re.compile('a')", "numpy.load(path)", "run(command, shell=False)"])
def test_the_safety_rule_lets_harmless_code_pass(line: str) -> None:
    assert not faults_of_safety(line)


def test_the_face_holds_the_facade_and_four_links_only() -> None:
    links = {path.name for path in (ROOT / "niwaki").iterdir() if path.is_symlink()}
    files = {path.name for path in (ROOT / "niwaki").iterdir() if path.name not in links}
    assert links == set(PACKAGES)
    assert files - {"__pycache__"} == FACE
    for name in links:
        assert (ROOT / "niwaki" / name).readlink() == Path("..") / name  # relative: they survive a move and an archive


def test_git_tracks_the_links_as_links() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "niwaki"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    links = {line.split("\t")[1] for line in listing.stdout.splitlines() if line.startswith("120000")}
    assert links == {f"niwaki/{name}" for name in PACKAGES}


def test_every_module_says_what_it_owns() -> None:
    for package in PACKAGES:
        for path in python_files(package):
            assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} has no docstring"
