"""Start-up hook: tells MergeKit about hi_merging as soon as a program imports it.

Installed twice: here, for `activate()`, and as a top-level module in site-packages,
where a `.pth` file runs it at every interpreter start. So it imports nothing but what
the interpreter has loaded anyway, prints nothing, and names the package only when
MergeKit is there.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HOOKS = {
    "mergekit.merge_methods": "register_method",
    "mergekit.plan": "wrap_planner",
    "mergekit.merge": "wrap_merge",
}
"""Module of MergeKit -> function of `mergekit_himerging.plugin` that takes it."""

PACKAGE = "mergekit_himerging."


def is_disabled() -> bool:
    """Tell whether the environment switches the plug-in off."""
    value = os.environ.get("MERGEKIT_HIMERGING_DISABLE", "")
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def install() -> None:
    """Hook MergeKit's modules, those loaded already and those still to come.

    Idempotent, also between the two copies of this file.
    """
    if is_disabled():
        return
    if not any(getattr(finder, "is_himerging", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in HOOKS:
        module = sys.modules.get(name)
        if module is not None and not is_half_loaded(module):
            apply_hook(module)


def is_half_loaded(module: "ModuleType") -> bool:
    """Tell whether the import of a module has yet to end."""
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def apply_hook(module: "ModuleType") -> None:
    """Run the hook of one loaded module; where it fails, say so when it matters."""
    try:
        from mergekit_himerging import plugin

        getattr(plugin, HOOKS[module.__name__])(module)
    except Exception as error:  # MergeKit's other methods must go on working
        reason = f"{type(error).__name__} in {module.__name__}: {error}"
        for name in HOOKS:
            refuse_ours(sys.modules.get(name), reason)


def refuse_ours(module: "ModuleType | None", reason: str) -> None:
    """Make what asks a module of MergeKit for hi_merging end with the reason."""
    for name in ("get", "run_merge"):
        function = getattr(module, name, None)
        if callable(function) and not hasattr(function, "himerging_reason"):
            setattr(module, name, refusing(function, reason))


def refusing(function: "Callable[..., Any]", reason: str) -> "Callable[..., Any]":
    """Wrap a function that takes the method's name or a recipe."""

    def checked(*args: "Any", **kwargs: "Any") -> "Any":
        asked = (*args, *kwargs.values())
        if any(getattr(a, "merge_method", a) == "hi_merging" for a in asked):
            import click

            raise click.ClickException(
                f"hi_merging could not be set up ({reason}); reinstall "
                "mergekit-himerging together with a mergekit that it supports"
            )
        return function(*args, **kwargs)

    checked.himerging_reason = reason  # type: ignore[attr-defined]
    return checked


class Finder:
    """Finds MergeKit's modules and ours where the others find them, and hooks them."""

    is_himerging = True

    def find_spec(
        self, name: str, path: "Any" = None, target: "Any" = None
    ) -> "ModuleSpec | None":
        """Return the other finders' spec with a loader that runs the hook, or None."""
        if name not in HOOKS and not name.startswith(PACKAGE):
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class Loader:
    """Loads as the loader it wraps, and steps out of the way before the module runs."""

    def __init__(self, wrapped: "Any") -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> "Any":
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Leave it to the wrapped loader."""
        module: ModuleType | None = self.wrapped.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module, then its hook or, after one of ours, those put off."""
        module.__loader__ = self.wrapped
        if module.__spec__ is not None:
            module.__spec__.loader = self.wrapped
        self.wrapped.exec_module(module)
        # One of ours that was imported first has led to MergeKit while it was half
        # loaded, and could not hook it then.
        others = [
            other
            for name, other in list(sys.modules.items())
            if name.startswith(PACKAGE) and other is not module
        ]
        if any(map(is_half_loaded, others)):
            return
        if module.__name__ in HOOKS:
            apply_hook(module)
        else:
            install()
