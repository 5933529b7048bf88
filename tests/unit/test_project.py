"""What the project says about itself is true: import direction, the README's file tree and feature table, stems."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hfdist"
# A module imports only from its left, lazily or not. `__init__` (lazy exports) and `__main__`-like entries come last.
ORDER = [
    *("errors", "plugins", "config", "launch", "plan", "measure", "waits", "comm", "mesh"),
    *("models", "parallel", "engine"),
    *(
        "checkpoint",
        "native",
        "accelerator",
        "verify",
        "patching",
        "run",
        "recipe",
        "report",
        "compare",
        "cli",
        "__init__",
    ),
]


def imports(path: Path) -> set[tuple[str, int]]:
    """Top-level hfdist modules that `path` imports anywhere but under TYPE_CHECKING, with the line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "hfdist" else [node.module]
            )
        for name in names:
            parts = (name or "").split(".")
            if parts[0] == "hfdist":
                found.add((parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__", node.lineno))
    return found


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_its_place() -> None:
    assert {home(path) for path in modules()} <= set(ORDER)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_left(path: Path) -> None:
    mine = ORDER.index(home(path))
    wrong = {
        f"line {line}: {name}"
        for name, line in imports(path)
        # `hfdist.__version__` and the lazy exports are at the right of all; a package imports within itself.
        if ORDER.index(name) > mine
    }
    assert not wrong


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from hfdist import cli\ndef f():\n    import hfdist.recipe.run\n    from hfdist.errors import say\n"
    )
    assert {name for name, _ in imports(file)} == {"cli", "recipe", "errors"}


def test_hfdists_own_engine_never_imports_deepspeed() -> None:
    naming = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "deepspeed" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed")
    }
    assert naming <= {"native.py"}


def stems(folder: Path, suffix: str) -> set[str]:
    return {path.stem for path in folder.glob(f"*{suffix}")}


def test_recipes_and_configs_share_their_stems() -> None:
    assert stems(ROOT / "recipes", ".py") == stems(PACKAGE / "configs", ".yaml")
    assert (ROOT / "accelerate_configs").resolve() == PACKAGE / "configs"


@pytest.mark.parametrize("stem", sorted(stems(ROOT / "recipes", ".py")))
def test_a_recipe_is_one_screen_and_says_how_to_run_it(stem: str) -> None:
    source = (ROOT / "recipes" / f"{stem}.py").read_text(encoding="utf-8")
    assert source.count("\n") <= 120
    words = ast.get_docstring(ast.parse(source)) or ""
    assert f"accelerate launch recipes/{stem}.py" in words
    assert f"accelerate launch --config_file accelerate_configs/{stem}.yaml recipes/{stem}.py" in words
    assert re.search(r"^Wires", words, re.M)
    assert re.search(r"^Memory", words, re.M)
    assert re.search(r"\d MB", words)


def test_the_numbers_of_the_docstrings_are_the_plans() -> None:
    """Memory kept, peak and wire of the default model at N = 2, as zero1, zero2 and zero3 state them."""
    from hfdist.models.size import model_size
    from hfdist.plan import Layout, format_bytes, plan_step
    from hfdist.recipe import load_model
    from hfdist.recipe.arguments import parse

    size = model_size(load_model(parse("x", [])))
    for stage in (1, 2, 3):
        words = (ROOT / "recipes" / f"zero{stage}.py").read_text(encoding="utf-8")
        step = plan_step(size, Layout(stage=stage, world_size=2))
        assert f"P = {size.num_parameters:,}" in words
        assert f"N = 2: {format_bytes(step.memory.at_rest_total)} " in words
        assert format_bytes(step.memory.peak_total) in words
        assert format_bytes(step.wire.bound) in words


def test_configs_have_the_same_keys_in_the_same_order() -> None:
    keys = {path.stem: list(yaml.safe_load(path.read_text())) for path in (PACKAGE / "configs").glob("*.yaml")}
    assert len({tuple(value) for value in keys.values()}) == 1, keys


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_file_tree_is_the_projects() -> None:
    block = re.search(r"## Files\n+```\n(.*?)```", readme(), re.S)
    assert block is not None
    listed, parents = set(), []
    for line in block.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        parents[depth:] = [name]
        assert len(line.split(None, 1)) == 2, f"no description: {line}"
        listed.add("/".join(part.rstrip("/") for part in parents))
    missing = {path for path in listed if not (ROOT / path).exists()}
    assert not missing
    here = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    here = {f"hfdist/{name}" for name in here - {"__init__.py"}} | {"hfdist/configs"}
    here |= {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}
    here |= {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    here |= {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert here <= listed


def test_the_readmes_feature_table_is_true() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in readme().split("## What works")[1].split("## ")[0].splitlines()
        if line.startswith("|")
    ][2:]
    works = {row[1] for row in rows if row[3].startswith("works")}
    assert works == stems(ROOT / "recipes", ".py")
    for technique, recipe, config, status in rows:
        if status.startswith("works"):
            assert (ROOT / "recipes" / f"{recipe}.py").exists(), technique
            assert (ROOT / "accelerate_configs" / f"{config}.yaml").exists(), technique
        else:
            assert status == "not yet", technique


def test_the_readmes_links_exist() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", readme())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
