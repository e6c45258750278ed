"""What is merged with what: the benchmark's settings, and their experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path("recipes/smollm2-medical")
"""From the repository's root, so that no machine's folders get into results."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Experts that are merged.

    Attributes:
        name: of its files.
        title: for the page.
        experts: by task, in order, the name of the expert's folder.
        mixed: the folder of one adapter trained on all tasks together.
        is_brief: only the core rows are run.
    """

    name: str
    title: str
    experts: Mapping[str, str]
    mixed: str | None
    is_brief: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in order."""
        return tuple(self.experts)

    @property
    def missing(self) -> tuple[str, ...]:
        """Experts that are not there."""
        return tuple(e for e in self.experts.values() if not is_there(e))


def _setting(name: str, title: str, *tasks: str) -> Setting:
    return Setting(name, title, {t: t for t in tasks}, f"mixed-{name}")


SETTINGS = {
    setting.name: setting
    for setting in (
        _setting("choice", "bilingual choice", "en-mcqa", "zh-mcqa"),
        _setting("english", "English, two tasks", "en-mcqa", "en-qa"),
        _setting("bilingual", "bilingual, two tasks", "en-mcqa", "zh-qa"),
        _setting("four", "all four", "en-mcqa", "zh-mcqa", "en-qa", "zh-qa"),
        Setting(
            "english-full",
            "English, the choice expert fully fine-tuned",
            {"en-mcqa": "en-mcqa-full", "en-qa": "en-qa"},
            None,
            is_brief=True,
        ),
    )
}


def expert_folder(expert: str) -> Path:
    """Return where an expert lies."""
    return HERE / "experts" / expert


def is_there(expert: str) -> bool:
    """Return whether an expert has been trained."""
    return expert_folder(expert).is_dir()


def model_of(expert: str, base: str) -> str:
    """Name an expert as recipes do: a folder, or the base with an adapter."""
    folder = expert_folder(expert)
    is_adapter = (folder / "adapter_config.json").exists()
    return f"{base}+{folder}" if is_adapter else str(folder)
