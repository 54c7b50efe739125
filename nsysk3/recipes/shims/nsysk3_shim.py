"""The recipe that all of nsysk3's are.  It runs in the Python of ``nsys recipe``, and nsysk3 in its own.

NVIDIA's library wants an older numpy and pandas than nsysk3, so nsysk3 is a program here, never an import.  Of that
library only what 2024.2 and the recipes of 2025 share is used; Python 3.8 is enough.
"""

# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from nsys_recipe import nsys_constants
from nsys_recipe.lib import exceptions, nsys_path, recipe
from nsys_recipe.lib.args import Option
from nsys_recipe.log import logger
from pyarrow import parquet

_QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}


class Shim(recipe.Recipe):
    """Map: export each report.  Reduce: analyse all of them together, for ranks are compared with one another."""

    def run(self, context: Any) -> None:
        """Write the recipe's directory; a report that cannot be exported is named and left out."""
        super().run(context)
        nsysk3 = _find_nsysk3()
        reports = [str(Path(report).absolute()) for report in self._parsed_args.input]
        exports = [[nsysk3, "export", "--quiet", *_this_nsys(), report] for report in reports]
        # subprocess.run is a function that every worker has; one of ours would have to be importable there.
        done = context.wait(context.map(subprocess.run, exports, **_QUIET))
        for each in done:
            _tell(each)
        pairs = zip(reports, done)  # noqa: B905 - its strict came with Python 3.10
        made = [(report, each.stdout.strip()) for report, each in pairs if each.returncode == 0]
        good = [export if Path(export).exists() else report for report, export in made]  # a worker has its own disk
        if not good:
            raise exceptions.ValueError(f"none of {len(reports)} reports could be exported")
        out = self.get_output_dir()
        analysis = [nsysk3, "analyze", "--quiet", "--format", "recipe", "--recipe", self.get_recipe_name()]
        analysis += ["--window", self._parsed_args.window, "--out", out, *good]
        result = subprocess.run(analysis, **_QUIET)
        if not list(Path(out).glob("*.nsys-analysis")):
            raise exceptions.ValueError([f"nsysk3 analyze: exit code {result.returncode}", *_said(result)][-1])
        _tell(result)
        if self._parsed_args.csv:
            for table in Path(out).glob("*.parquet"):
                # By its path: pandas hands over a file of Python's, and a reading thread that lets go of that while
                # Python ends aborts the recipe (1 of 70 on a busy machine).
                parquet.read_table(str(table)).to_pandas().to_csv(table.with_suffix(".csv"))
        self.add_output_file("stats.ipynb", "Notebook")
        facts = {"EndTime": str(datetime.now()), "InputFiles": reports, "Outputs": self._output_files}
        self._analysis_dict.update(facts)
        self.create_analysis_file()  # over nsysk3's own: this one says what the running library says of itself

    @classmethod
    def get_argument_parser(cls) -> Any:
        """Options of the recipe; newer libraries add the first two themselves."""
        parser = super().get_argument_parser()
        for option, flag in (("OUTPUT", "--output"), ("FORCE_OVERWRITE", "--force-overwrite")):
            if flag not in parser.format_usage():
                parser.add_recipe_argument(Option[option])
        parser.add_recipe_argument(Option.INPUT, required=True)
        parser.add_recipe_argument(Option.CSV)
        text = "What to count: capture, prefill, steady, or START:END after the first kernel, such as 0.5s:2s"
        parser.add_recipe_argument("--window", default="capture", help=text)
        return parser


def _find_nsysk3() -> str:
    """$NSYSK3, else PATH, else beside this Python, else the installation that this file is part of."""
    named = os.environ.get("NSYSK3")
    folders = [Path(sys.executable).parent, *(parent / "bin" for parent in Path(__file__).parents)]
    places = ["nsysk3", *(str(folder / "nsysk3") for folder in folders)]
    for found in filter(None, map(shutil.which, [named] if named else places)):
        return str(Path(found).absolute())
    what = f"$NSYSK3 {named}: no such program" if named else "no nsysk3 on PATH: set NSYSK3 to the program"
    raise exceptions.ValueError(what)


def _this_nsys() -> list[str]:
    """The nsys that runs this recipe, unless the user chose another."""
    here = nsys_path.find_installed_file(nsys_constants.NSYS_EXE_NAME)
    return [] if os.environ.get("NSYSK3_NSYS") else ["--nsys", str(here)]


def _said(done: Any) -> list[str]:
    return [line[len("nsysk3: ") :] for line in done.stderr.splitlines() if line.startswith("nsysk3: ")]


def _tell(done: Any) -> None:
    for line in _said(done):
        logger.error(line)
