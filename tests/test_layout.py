"""Imports run one way: a file imports only files that stand above it here."""

import ast
from pathlib import Path

import mergekit_himerging

ORDER = (
    *("files", "names", "parameters", "staging", "kernel", "scores"),
    "analysis.contribution",
    *("recipe", "scope", "method", "plan", "tasks"),
    *("union", "seam", "preflight.finding", "preflight.headers"),
    *("preflight.checkpoint", "preflight.models", "preflight.samples"),
    *("preflight.quantised", "preflight.heads", "preflight.vocabulary"),
    *("preflight.output", "preflight.adapters", "preflight.configs"),
    *("preflight.slices", "preflight.planned", "preflight.weights"),
    *("preflight.coverage", "preflight.deltas", "preflight.entry"),
    *("preflight.inspect", "preflight", "planning", "verify"),
    *("export.filters", "export.breadcrumbs", "export.recipe"),
    *("views.words", "views.factors", "views.table", "views.panels"),
    *("views.plot", "views.markdown", "merged_folder"),
    *("analysis.rows", "analysis.row_files", "analysis.samples"),
    *("analysis.overlap", "analysis.calibration", "analysis.data"),
    *("analysis.replay", "analysis.jobs", "analysis.agreement", "analysis.selfcheck"),
    *("analysis.streams", "analysis.graph", "analysis.probe_scores"),
    *("analysis.teachers", "analysis.objective", "analysis.proof"),
    *("analysis.candidates", "analysis.slopes", "analysis.gradients"),
    *("analysis.differences", "analysis.measured", "analysis.settings"),
    *("analysis.judging", "analysis.run"),
    *("analysis.cache", "analysis.references", "analysis.continuation"),
    *("analysis.drawing", "analysis.self_rows"),
    *("analysis.session", "estimate", "search"),
    *("evaluation.intervals", "evaluation.metrics", "evaluation.records"),
    *("evaluation.data", "evaluation.forward", "evaluation.options"),
    *("evaluation.scoring", "evaluation.generation", "evaluation.compare"),
    *("evaluation.run", "evaluation.table", "evaluation.models", "smoke"),
    *("plugin", "boot", "api", "__init__", "cli"),
)
PURE = (
    *("files", "names", "parameters", "kernel", "scores"),
    "analysis.contribution",
)
ROOT = Path(mergekit_himerging.__file__).parent


def read_imports(path: Path) -> set[str]:
    """Names of the package's files that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            parent = node.module.removeprefix("mergekit_himerging").lstrip(".")
            if node.module.startswith("mergekit_himerging"):
                for alias in node.names:
                    child = f"{parent}.{alias.name}".lstrip(".")
                    found.add(child if child in ORDER else parent)
    return found


def test_every_file_has_its_place_and_imports_only_from_above():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py" or path.parent == ROOT
    }
    files["preflight"] = ROOT / "preflight" / "__init__.py"
    assert set(files) == set(ORDER)
    for name, path in files.items():
        above = set() if name in PURE else set(ORDER[: ORDER.index(name)])
        assert read_imports(path) <= above, name
