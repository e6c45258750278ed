"""Hi-Merging (Hierarchical Iterative Merging) as a MergeKit merge method.

Importing this package changes nothing; an installed one is found by MergeKit itself.
"""

try:
    from mergekit_himerging import boot
except ImportError:  # an installed package has it beside it, in site-packages
    import _mergekit_himerging_boot as boot  # type: ignore

__all__ = ["__version__", "activate"]

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
