"""The start-up hook and the packaging, in environments that pip has filled.

Nothing here looks at this process: it may have the project installed in any way.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mergekit
import pytest
import torch
import yaml
from conftest import make_recipe
from fresh import (
    LONGEST,
    Outcome,
    Venv,
    WarmPython,
    clean_environment,
    link_dependencies,
    make_venv,
)
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="fresh interpreters are forked"
)

REPOSITORY = Path(__file__).parents[1]

SEAM = """
import mergekit.merge, mergekit.merge_methods, mergekit.plan
import mergekit.scripts.multimerge, mergekit.scripts.run_yaml

assert mergekit.merge_methods.get("hi_merging").spec.name == "hi_merging"
planner = mergekit.plan.MergePlanner
hooked = [planner._plan, planner.plan_layer, planner.plan_to_disk]
hooked += [mergekit.merge.run_merge]
for function in hooked:
    # Hooked, and once only.
    assert hasattr(function, "__wrapped__"), f"{function} is not hooked"
    assert not hasattr(function.__wrapped__, "__wrapped__"), f"{function}: twice"
for script in (mergekit.scripts.run_yaml, mergekit.scripts.multimerge):
    assert script.run_merge is mergekit.merge.run_merge, f"{script} escapes"
assert mergekit.merge.MergePlanner is planner
"""
"""Code that fails unless MergeKit knows the method and is hooked, wherever bound."""

FINDERS = """
import sys
print(sum(hasattr(finder, "is_himerging") for finder in sys.meta_path))
"""


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_dependencies(tmp_path_factory.mktemp("outer") / "dependencies")


@pytest.fixture(scope="session")
def bare_venv(tmp_path_factory: pytest.TempPathFactory, dependencies: Path) -> Venv:
    """An environment with MergeKit and without us."""
    return make_venv(tmp_path_factory.mktemp("bare") / "venv", dependencies)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from."""
    folder = tmp_path_factory.mktemp("checkout") / "project"
    shutil.copytree(
        REPOSITORY / "mergekit_himerging",
        folder / "mergekit_himerging",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for module in REPOSITORY.glob("_*.py"):
        shutil.copy(module, folder)
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=checkout,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=LONGEST,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel_venv(
    tmp_path_factory: pytest.TempPathFactory, bare_venv: Venv, wheel: Path
) -> Venv:
    venv = bare_venv.copy_to(tmp_path_factory.mktemp("with_wheel") / "venv")
    venv.pip("install", "--no-deps", wheel)
    return venv


@pytest.fixture(scope="session")
def editable_venv(
    tmp_path_factory: pytest.TempPathFactory, bare_venv: Venv, checkout: Path
) -> Venv:
    """An environment with an editable install of its own checkout, `../project`."""
    pytest.importorskip("editables", reason="hatchling needs it for such an install")
    folder = tmp_path_factory.mktemp("with_editable")
    venv = bare_venv.copy_to(folder / "venv")
    own = shutil.copytree(checkout, folder / "project")
    venv.pip("install", "--no-deps", "--no-build-isolation", "--editable", own)
    return venv


@pytest.fixture(scope="session")
def warm(bare_venv: Venv, dependencies: Path) -> Iterator[WarmPython]:
    python = WarmPython(bare_venv, dependencies)
    yield python
    python.close()


@pytest.fixture(params=["wheel_venv", "editable_venv"])
def installed(request: pytest.FixtureRequest) -> Venv:
    venv = request.getfixturevalue(request.param)
    assert isinstance(venv, Venv)
    return venv


def succeed(outcome: Outcome) -> str:
    """Return what a process printed, which must have ended well and quietly."""
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out.strip()


def script(name: str) -> Path:
    """Return the command's file as MergeKit's own installation has put it."""
    return Path(sysconfig.get_path("scripts")) / name


RunCommand = Callable[..., Outcome]


@pytest.fixture
def run_command(warm: WarmPython, tmp_path: Path) -> RunCommand:
    """Run an unmodified command of MergeKit in an environment, in a warm process."""

    def run(
        venv: Venv,
        recipe: dict[str, object],
        *,
        command: str = "mergekit-yaml",
        first: tuple[Path, ...] = (),
    ) -> Outcome:
        path = tmp_path / f"{recipe['merge_method']}.yml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        out = tmp_path / str(recipe["merge_method"])
        places = (
            (path, out)
            if command == "mergekit-yaml"
            else (path, "--out-path", out, "-I", tmp_path / "between")
        )
        file = str(script(command))
        return warm.run(
            f"import runpy; runpy.run_path({file!r}, run_name='__main__')",
            *(file, *places, "--quiet"),
            site_packages=venv.site_packages,
            first=first,
        )

    return run


def assert_merged(zoo: Path, folder: Path, *experts: str, weight: float) -> None:
    """Compare a folder with base + weight * sum of deltas, computed by hand."""
    base, merged, *tuned = (
        load_file(place / "model.safetensors")
        for place in (zoo / "base", folder, *(zoo / name for name in experts))
    )
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        delta = sum(weight * (expert[name] - tensor) for expert in tuned)
        torch.testing.assert_close(merged[name], tensor + delta)


# The environments


def test_environment_without_our_wheel_does_not_know_us(bare_venv, warm):
    names = ["mergekit_himerging", "_mergekit_himerging_boot"]
    found = bare_venv.run(
        "-c",
        "from importlib import metadata, util\n"
        f"print([util.find_spec(name) for name in {names}])\n"
        "print(metadata.version('mergekit-himerging'))",
    )
    assert found.out == "[None, None]\n"
    assert "No package metadata was found for mergekit-himerging" in found.err
    asked = warm.run(
        "import mergekit.merge_methods as m; m.get('ties'); m.get('hi_merging')",
        site_packages=bare_venv.site_packages,
    )
    assert asked.err.endswith("RuntimeError: Unimplemented merge method hi_merging\n")


def test_wheel_holds_package_hook_and_metadata_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = wheel.name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {
        "mergekit_himerging",
        "_mergekit_himerging_boot.py",
        "mergekit_himerging.pth",
        f"mergekit_himerging-{version}.dist-info",
    }


def test_wheel_holds_every_module_and_the_mark_of_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = REPOSITORY / "mergekit_himerging"
    modules = {str(m.relative_to(REPOSITORY)) for m in package.rglob("*.py")}
    modules.remove("mergekit_himerging/boot.py")  # it lies beside the package
    packaged = {name for name in names if name.startswith("mergekit_himerging/")}
    assert packaged == {*modules, "mergekit_himerging/py.typed"}


def test_installed_version_is_the_packages(installed):
    code = (
        "import importlib.metadata, mergekit_himerging as ours\n"
        "print(importlib.metadata.version('mergekit-himerging'), ours.__version__)"
    )
    left, right = succeed(installed.run("-c", code)).split()
    assert left == right


def test_uninstall_leaves_nothing_behind(installed, bare_venv, tmp_path):
    venv = installed.copy_to(tmp_path / "venv")
    assert venv.listing() != bare_venv.listing()
    # What an interpreter caches at its start must go as well.
    succeed(venv.run("-c", "import mergekit_himerging"))
    venv.pip("uninstall", "--yes", "mergekit-himerging")
    assert venv.listing() == bare_venv.listing()


# A recipe, with MergeKit's own commands


@pytest.mark.parametrize("command", ["mergekit-yaml", "mergekit-multi"])
def test_stock_command_merges_a_recipe(installed, run_command, zoo, tmp_path, command):
    recipe = make_recipe(zoo, "a", "b", parameters={"weight": 0.3})
    outcome = run_command(installed, recipe, command=command)
    assert outcome.code == 0, outcome.err
    assert_merged(zoo, tmp_path / "hi_merging", "a", "b", weight=0.3)


def test_stock_command_merges_a_recipe_from_a_cold_start(wheel_venv, zoo, tmp_path):
    recipe = tmp_path / "recipe.yml"
    text = yaml.safe_dump(make_recipe(zoo, "a", "b", parameters={"weight": 0.3}))
    recipe.write_text(text, encoding="utf-8")
    command = script("mergekit-yaml")
    outcome = wheel_venv.run(command, recipe, tmp_path / "merged", "--quiet")
    assert outcome.code == 0, outcome.err
    assert_merged(zoo, tmp_path / "merged", "a", "b", weight=0.3)


# The import hook


@pytest.mark.parametrize(
    "module",
    [
        "mergekit.merge_methods",
        "mergekit.merge_methods.registry",
        "mergekit.merge_methods.base",
        "mergekit.plan",
        "mergekit.merge",
        "mergekit.config",
        "mergekit.card",
        "mergekit.common",
        "mergekit.graph",
        "mergekit.scripts.run_yaml",
        "mergekit.scripts.multimerge",
        "mergekit.scripts.merge_raw_pytorch",
        "mergekit_himerging.plugin",
        "mergekit_himerging.method",
        "mergekit_himerging.tasks",
    ],
)
def test_hooks_hold_whichever_module_comes_first(installed_wheel, module):
    succeed(installed_wheel(f"import {module}\n{SEAM}"))


@pytest.fixture
def installed_wheel(warm: WarmPython, wheel_venv: Venv) -> Callable[..., Outcome]:
    """Run code in an interpreter that has started with the wheel installed."""

    def run(code: str, **options: str) -> Outcome:
        return warm.run(code, site_packages=wheel_venv.site_packages, **options)

    return run


@pytest.mark.parametrize(
    "module", ["mergekit.merge_methods", "mergekit.plan", "mergekit.merge"]
)
def test_looking_for_a_module_does_not_lose_its_hook(installed_wheel, module):
    succeed(
        installed_wheel(
            f"import importlib.util\nassert importlib.util.find_spec('{module}')\n"
            f"{SEAM}"
        )
    )


@pytest.mark.parametrize("module", ["mergekit.plan", "mergekit.merge"])
def test_reloaded_module_is_hooked_again(installed_wheel, module):
    reloaded = f"import importlib, {module}\nold = {module}\nimportlib.reload(old)\n"
    succeed(installed_wheel(f"{reloaded}\n{SEAM}"))


def test_reloaded_registry_package_keeps_the_method(installed_wheel):
    code = "import importlib, mergekit.merge_methods as m\nimportlib.reload(m)\n"
    succeed(installed_wheel(code + SEAM))


def test_hooked_module_looks_as_if_loaded_by_its_own_loader(installed_wheel):
    code = """
import importlib.machinery, inspect, mergekit.plan
own = importlib.machinery.SourceFileLoader
assert type(mergekit.plan.__loader__) is own
assert type(mergekit.plan.__spec__.loader) is own
print(inspect.getsource(mergekit.plan).count("class MergePlanner"))
"""
    assert succeed(installed_wheel(code)) == "1"


def test_source_of_a_module_can_be_read_before_its_import(installed_wheel):
    code = """
import importlib.util
spec = importlib.util.find_spec("mergekit.plan")
print(spec.loader.get_source("mergekit.plan").count("class MergePlanner"))
"""
    assert succeed(installed_wheel(code)) == "1"


def test_start_and_install_again_leave_one_finder(installed_wheel):
    code = """
import mergekit_himerging
import _mergekit_himerging_boot
_mergekit_himerging_boot.install()
mergekit_himerging.activate()
"""
    assert succeed(installed_wheel(code + FINDERS)) == "1"


def test_activating_again_changes_nothing(installed_wheel):
    again = "import mergekit_himerging\nmergekit_himerging.activate()\n"
    succeed(installed_wheel(f"{again}{SEAM}{again}{again}{SEAM}"))


# Without `.pth` files: `python -S`


@pytest.fixture
def without_start_up(warm: WarmPython, wheel_venv: Venv) -> Callable[..., Outcome]:
    """Run code in an interpreter that has read no `.pth` file but finds us."""

    def run(code: str, **options: str) -> Outcome:
        return warm.run(code, first=[wheel_venv.site_packages], **options)

    return run


def test_without_start_up_the_method_is_unknown(without_start_up):
    asked = without_start_up(
        "import mergekit_himerging, mergekit.merge_methods as m; m.get('hi_merging')"
    )
    assert asked.err.endswith("RuntimeError: Unimplemented merge method hi_merging\n")


ACTIVATE = "import mergekit_himerging; mergekit_himerging.activate()"


def test_activating_before_the_import_of_mergekit(without_start_up):
    succeed(without_start_up(f"{ACTIVATE}\n{SEAM}"))


@pytest.mark.parametrize(
    "module",
    [
        "mergekit.common",
        "mergekit.merge_methods",
        "mergekit.plan",
        "mergekit.merge",
        "mergekit.scripts.run_yaml",
    ],
)
def test_activating_after_the_import_of_mergekit(without_start_up, module):
    succeed(without_start_up(f"import {module}\n{ACTIVATE}\n{SEAM}"))


def test_activating_reaches_a_name_bound_in_a_notebook(without_start_up):
    cells = f"""
from mergekit.merge import run_merge
original = run_merge
{ACTIVATE}
import mergekit.merge
assert run_merge is mergekit.merge.run_merge
assert run_merge is not original
assert run_merge.__wrapped__ is original
"""
    succeed(without_start_up(cells))


def test_activated_process_merges_a_recipe(without_start_up, zoo, tmp_path):
    recipe = make_recipe(zoo, "a", parameters={"weight": 0.5})
    code = f"""
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
{ACTIVATE}
config = MergeConfiguration.model_validate({recipe!r})
run_merge(config, {str(tmp_path / "merged")!r}, MergeOptions(quiet=True))
"""
    outcome = without_start_up(code)
    assert outcome.code == 0, outcome.err
    assert_merged(zoo, tmp_path / "merged", "a", weight=0.5)


# Switched off


def test_variable_switches_the_method_off(installed_wheel):
    asked = installed_wheel(
        "import mergekit.merge_methods as m; m.get('ties'); m.get('hi_merging')",
        MERGEKIT_HIMERGING_DISABLE="1",
    )
    assert asked.err.endswith("RuntimeError: Unimplemented merge method hi_merging\n")


def test_variable_leaves_no_finder(wheel_venv):
    finders = ("-c", FINDERS)
    assert succeed(wheel_venv.run(*finders)) == "1"
    assert succeed(wheel_venv.run(*finders, MERGEKIT_HIMERGING_DISABLE="1")) == "0"


def test_activating_while_switched_off_names_the_variable(wheel_venv):
    activated = wheel_venv.run("-c", ACTIVATE, MERGEKIT_HIMERGING_DISABLE="1")
    assert activated.err.endswith(
        "RuntimeError: hi_merging is switched off by MERGEKIT_HIMERGING_DISABLE; "
        "unset it first\n"
    )


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_variable_that_says_no_switches_nothing_off(installed_wheel, value):
    succeed(installed_wheel(SEAM, MERGEKIT_HIMERGING_DISABLE=value))


# The start of an interpreter


def test_start_adds_one_module(installed, bare_venv):
    code = "import sys; print(*sorted(sys.modules))"
    without = succeed(bare_venv.run("-c", code)).split()
    added = set(succeed(installed.run("-c", code)).split()) - set(without)
    assert added == {"_mergekit_himerging_boot"}


@pytest.mark.parametrize("flags", [(), ("-X", "dev", "-W", "error"), ("-I",)])
def test_start_prints_nothing(installed, flags):
    assert installed.run(*flags, "-c", "pass") == Outcome(0, "", "")


def test_importing_the_package_loads_neither_torch_nor_mergekit(installed):
    code = "import sys, mergekit_himerging; print(*sys.modules)"
    roots = {name.split(".")[0] for name in succeed(installed.run("-c", code)).split()}
    assert "mergekit_himerging" in roots
    assert roots.isdisjoint({"torch", "transformers", "mergekit", "numpy", "click"})


# Broken installs


def remove_package(venv: Venv) -> None:
    shutil.rmtree(venv.site_packages / "mergekit_himerging")


def remove_boot(venv: Venv) -> None:
    (venv.site_packages / "_mergekit_himerging_boot.py").unlink()
    shutil.rmtree(venv.site_packages / "__pycache__")


def misspell_boot(venv: Venv) -> None:
    path = venv.site_packages / "_mergekit_himerging_boot.py"
    path.write_text("def install(:\n", encoding="utf-8")


def raise_in_boot(venv: Venv) -> None:
    path = venv.site_packages / "_mergekit_himerging_boot.py"
    path.write_text("raise OSError('disk')\n", encoding="utf-8")


def break_package(venv: Venv) -> None:
    path = venv.site_packages / "mergekit_himerging" / "__init__.py"
    path.write_text("raise OSError('disk')\n", encoding="utf-8")


def move_checkout(venv: Venv) -> None:
    """Point the editable install of a copied environment at a folder that is gone."""
    (path,) = venv.site_packages.glob("_editable_impl_*.pth")
    target = Path(path.read_text(encoding="utf-8").strip())
    assert (target / "mergekit_himerging").is_dir()
    path.write_text(f"{target}_moved\n", encoding="utf-8")


BREAKS = [
    ("wheel_venv", remove_package),
    ("wheel_venv", remove_boot),
    ("wheel_venv", misspell_boot),
    ("wheel_venv", raise_in_boot),
    ("wheel_venv", break_package),
    ("editable_venv", move_checkout),
]
WITH_HOOK = [
    (*BREAKS[0], "No module named 'mergekit_himerging'"),
    (*BREAKS[4], "OSError in mergekit.merge: disk"),
    (*BREAKS[5], "No module named 'mergekit_himerging'"),
]


@pytest.fixture
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Venv:
    name, break_it = request.param
    venv: Venv = request.getfixturevalue(name).copy_to(tmp_path / "venv")
    break_it(venv)
    return venv


def name_break(value: object) -> str | None:
    """Name a parameter of a test by what it breaks."""
    return value[1].__name__ if isinstance(value, tuple) else None


every_break = pytest.mark.parametrize("broken", BREAKS, indirect=True, ids=name_break)


@every_break
def test_broken_install_starts_in_silence(broken):
    assert broken.run("-c", "pass") == Outcome(0, "", "")


@every_break
def test_broken_install_leaves_other_methods(broken, warm):
    code = "import mergekit.merge_methods as m; print(m.get('ties').spec.name)"
    outcome = warm.run(code, site_packages=broken.site_packages)
    assert succeed(outcome) == "ties"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(case[:2], case[2]) for case in WITH_HOOK],
    indirect=["broken"],
    ids=name_break,
)
def test_recipe_on_a_broken_install_ends_with_one_line(
    broken, reason, run_command, zoo, tmp_path
):
    outcome = run_command(broken, make_recipe(zoo, "a"))
    assert_one_line(outcome, "hi_merging could not be set up", reason, "reinstall")
    assert not (tmp_path / "hi_merging").exists()


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    """Hold a failed command to one line of its own, at the end, with these words."""
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    line = outcome.err.splitlines()[-1]
    assert line.startswith("Error: ")
    assert outcome.err.count("Error: ") == 1
    for part in parts:
        assert part in line


# A MergeKit that has moved on


def rewrite(path: Path, *changes: tuple[str, str]) -> None:
    """Replace a linked file by a changed copy."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    for old, new in changes:
        assert old in text, f"{path.name} must have {old!r} to replace"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def rename_plan_layer(package: Path) -> None:
    rewrite(package / "plan.py", ("plan_layer", "plan_one_layer"))


def rename_parameter_of_run_merge(package: Path) -> None:
    rewrite(package / "merge.py", ("merge_config", "recipe"))


def rename_register(package: Path) -> None:
    registry = package / "merge_methods" / "registry.py"
    rewrite(registry, ("def register(", "def add("), ("    register(", "    add("))
    rewrite(
        package / "merge_methods" / "__init__.py",
        ("import get, register, reg", "import get, add, reg"),
        ('"register",', '"add",'),
    )


def rename_plan_module(package: Path) -> None:
    (package / "plan.py").rename(package / "planner.py")
    rewrite(package / "merge.py", ("mergekit.plan ", "mergekit.planner "))


def rename_field_of_planner(package: Path) -> None:
    rewrite(package / "plan.py", ("_current_module_layers", "_layers_so_far"))


MOVES = [
    (rename_plan_layer, "mergekit.plan.MergePlanner.plan_layer is gone"),
    (
        rename_parameter_of_run_merge,
        "mergekit.merge.run_merge takes recipe, out_path, options, config_source",
    ),
    (rename_register, "mergekit.merge_methods.register is gone"),
    (rename_plan_module, "mergekit.plan has moved"),
    (
        rename_field_of_planner,
        "mergekit.plan.MergePlanner has no _current_module_layers",
    ),
]


@pytest.fixture
def altered(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a MergeKit that differs from the installed one."""
    package = tmp_path / "altered" / "mergekit"
    shutil.copytree(Path(mergekit.__file__).parent, package, copy_function=os.symlink)
    request.param(package)
    return package.parent


@pytest.mark.parametrize(
    "altered", [move for move, _ in MOVES], indirect=True, ids=lambda m: m.__name__
)
def test_moved_seam_leaves_other_methods(
    altered, wheel_venv, run_command, zoo, tmp_path
):
    recipe = make_recipe(zoo, "a", parameters={"weight": 0.5})
    recipe["merge_method"] = "task_arithmetic"
    outcome = run_command(wheel_venv, recipe, first=(altered,))
    assert outcome.code == 0, outcome.err
    assert_merged(zoo, tmp_path / "task_arithmetic", "a", weight=0.5)


@pytest.mark.parametrize(
    ("altered", "moved"),
    MOVES,
    indirect=["altered"],
    ids=lambda m: getattr(m, "__name__", ""),
)
def test_moved_seam_stops_a_recipe_with_one_line(
    altered, moved, wheel_venv, run_command, zoo, tmp_path
):
    outcome = run_command(wheel_venv, make_recipe(zoo, "a"), first=(altered,))
    assert_one_line(outcome, "hi_merging", moved, "mergekit-himerging")
    assert not (tmp_path / "hi_merging").exists()
