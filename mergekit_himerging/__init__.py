"""Hi-Merging (Hierarchical Iterative Merging) as a MergeKit merge method.

Importing this package changes nothing; an installed one is found by MergeKit itself.
What is made here from Python is loaded when it is first asked for; `search` and
`export` are functions of `mergekit_himerging.api`.
"""

from typing import TYPE_CHECKING

try:
    from mergekit_himerging import boot
except ImportError:  # an installed package has it beside it, in site-packages
    import _mergekit_himerging_boot as boot  # type: ignore

if TYPE_CHECKING:
    from mergekit_himerging.api import analyze, check, evaluate, make_plan

__all__ = ["__version__", "activate", "analyze", "check", "evaluate", "make_plan"]

__version__ = "0.1.0"


def activate() -> None:
    """Make `merge_method: hi_merging` known to MergeKit in this process.

    For notebooks and for installs whose `.pth` files are not read (`python -S`,
    `pip install --target`, PYTHONPATH). May be called before or after MergeKit is
    imported, and again.

    Raises:
        RuntimeError: MERGEKIT_HIMERGING_DISABLE is set.
    """
    if boot.is_disabled():
        raise RuntimeError(
            "hi_merging is switched off by MERGEKIT_HIMERGING_DISABLE; unset it first"
        )
    boot.install()


def __getattr__(name: str) -> object:
    """Load the Python API, which takes torch and MergeKit, when it is asked for."""
    if name in __all__:
        from mergekit_himerging import api

        return getattr(api, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
