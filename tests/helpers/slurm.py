"""Stand-ins for sbatch and srun that run what they are given, here, as Slurm would on its nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SBATCH: Final = '''#!{python}
"""Runs the script at once, each job of an array in turn, from the folder it is submitted in."""
import os, re, subprocess, sys
script = sys.argv[1]
text = open(script).read()
given = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
first, _, last = given.get("array", "0").partition("-")
log = open(os.path.splitext(script)[0] + ".log", "w")
for task in range(int(first), int(last or first) + 1):
    env = dict(os.environ, SLURM_JOB_ID="71", SLURM_NNODES=given["nodes"], SLURM_CPUS_ON_NODE="4")
    env.update(SLURM_ARRAY_TASK_ID=str(task)) if "array" in given else None
    code = subprocess.run(["bash", script], env=env, stdout=log, stderr=log).returncode
    print("exit code", code, file=log, flush=True)
print("Submitted batch job 71")
'''
SRUN: Final = '''#!{python}
"""Starts the tasks of a step, all on this machine."""
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
count = next(place for place, word in enumerate(words) if not word.startswith("--"))
tasks, per = int(options["ntasks"]), int(options["ntasks-per-node"])
def start(rank):
    env = dict(os.environ, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % per))
    env.update(SLURM_NODEID=str(rank // per), SLURM_STEP_NUM_TASKS=str(tasks), SLURM_STEP_ID="3")
    env.update(SLURM_NTASKS=str(tasks), SLURM_STEP_TASKS_PER_NODE=f"{{per}}(x{{tasks // per}})")
    env.update(SLURM_TASKS_PER_NODE=env["SLURM_STEP_TASKS_PER_NODE"])
    return subprocess.Popen(words[count:], env=env)
sys.exit(max(process.wait() for process in [start(rank) for rank in range(tasks)]))
'''


def install(folder: Path) -> Path:
    """Writes both into a folder, which belongs in PATH."""
    folder.mkdir(exist_ok=True)
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        path = folder / name
        path.write_text(
            text.replace("{python}", sys.executable).replace("{{", "{").replace("}}", "}")
        )
        path.chmod(0o755)
    return folder
