"""A recipe of Nsight Systems: the tables of `gputrace analyze` from its reports.

`nsys recipe` runs it in a Python of its own, in which gputrace need not be installed: the command
does the work. `gputrace recipe` says where this folder is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import nsys_recipe
import pandas
from nsys_recipe.lib import recipe
from nsys_recipe.lib.args import Option

TABLES = {
    "findings": ("findings",),
    "breakdown": ("breakdown",),
    "gpus": ("gpus",),
    "steps": ("step_list",),
    "phases": ("phases",),
    "gaps": ("gaps", "largest"),
    "collectives": ("collectives",),
    "links": ("links",),
    "kernels": ("kernels", "top"),
}
"""Names of files, and where their rows are in the JSON."""
MADE = {"json": "analysis.json", "text": "report.txt"}


class GputraceAnalyze(recipe.Recipe):
    """Reports of one run in, tables out."""

    def run(self, context):
        """Has gputrace read the reports, and writes what it says."""
        super().run(context)
        reports, steps = self._parsed_args.input, self._parsed_args.steps
        words = [*reports, *(["--steps", steps] if steps else [])]
        made = {form: _gputrace("analyze", *words, "--format", form) for form in MADE}
        for form, name in MADE.items():
            path = Path(self.add_output_file(name, form.upper()))
            path.write_text(made[form], encoding="utf-8")
        self._save_tables(json.loads(made["json"]))
        _gputrace("report", *words, "-o", self.add_output_file("report.html", "HTML"))
        self._analysis_dict |= {"EndTime": str(datetime.now()), "Outputs": self._output_files}
        self.create_analysis_file()
        sys.stdout.write(made["text"])

    def _save_tables(self, analysis):
        for name, place in TABLES.items():
            rows = analysis
            for key in place:
                rows = (rows or {}).get(key)
            if not rows:
                continue
            table = pandas.DataFrame([{key: _cell(row[key]) for key in row} for row in rows])
            table.to_parquet(self.add_output_file(f"{name}.parquet", "Parquet"))
            if self._parsed_args.csv:
                table.to_csv(self.add_output_file(f"{name}.csv", "CSV"), index=False)

    @classmethod
    def get_argument_parser(cls):
        """The options of other recipes, and ``--steps``."""
        parser = super().get_argument_parser()
        parser.add_recipe_argument(Option.INPUT, required=True)
        for option in (Option.OUTPUT, Option.FORCE_OVERWRITE, Option.CSV):
            parser.add_recipe_argument(option)
        parser.add_recipe_argument(
            "--steps", metavar="A:B", help="Measure these steps instead of the steady ones"
        )
        return parser


def _cell(value):
    """A value that a column holds: lists and objects as JSON."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _gputrace(*words):
    """Return what the command prints; end the recipe with its message if it fails."""
    run = subprocess.run(
        [*_command(), *words], env=_environment(), stdout=subprocess.PIPE, check=False
    )
    if run.returncode:
        raise SystemExit(run.returncode)
    return run.stdout.decode("utf-8")


def _command():
    if named := os.environ.get("GPUTRACE") or shutil.which("gputrace"):
        return [named]
    if find_spec("gputrace") is not None:
        return [sys.executable, "-m", "gputrace"]
    raise SystemExit("no command `gputrace` on the PATH; name it by the variable GPUTRACE")


def _environment():
    """Ours, with the nsys that runs this recipe, which gputrace has export the reports."""
    nsys = Path(nsys_recipe.__file__).resolve().parents[3] / "nsys"
    return ({"GPUTRACE_NSYS": str(nsys)} if nsys.exists() else {}) | dict(os.environ)
