"""examples/slurm.sh on a real SLURM: two slurmd on this machine, started for the test.

It installs nothing, and is skipped without slurmctld. Debian has it in slurm-wlm and munge. The
daemons need paths: `SLURM_PLUGINS` names the folder of plugins, if it isn't the built-in one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.spawn import free_port

ROOT = Path(__file__).parents[2]
COMMANDS = ("slurmctld", "slurmd", "slurmstepd", "munged", "sbatch", "sinfo")
FOUND = {name: shutil.which(name) for name in COMMANDS}
pytestmark = [
    pytest.mark.long,
    pytest.mark.multiproc,
    pytest.mark.skipif(not all(FOUND.values()), reason="no slurmctld, slurmd, or munged"),
]

# Each node's name is an address, since the script gives the first one to torchrun.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands find a cluster of two nodes."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool_127.0.0.1", "spool_127.0.0.2"):
        (folder / name).mkdir(parents=True)
    key, config = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    ports = [free_port() for _ in range(3)]
    user = "root" if os.getuid() == 0 else os.environ["USER"]
    text = CONFIG.format(host=host, ports=ports, folder=folder, user=user)
    if plugins := os.environ.get("SLURM_PLUGINS"):
        text += f"PluginDir={plugins}\n"
    config.write_text(text)
    munge = [f"--key-file={key}", f"--socket={folder}/munge.sock", "--force", "--foreground"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    slurmd = ["slurmd", "-D", "-f", str(config), "-d", str(FOUND["slurmstepd"]), "-N"]
    daemons = [
        ["munged", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        *([*slurmd, f"127.0.0.{number}"] for number in (1, 2)),
    ]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        for words in daemons:
            process = subprocess.Popen(
                [str(FOUND[words[0]]), *words[1:]],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            time.sleep(1)
        idle = [str(FOUND["sinfo"]), "-h", "-o", "%D %t"]
        for _ in range(60):
            done = subprocess.run(idle, env=environment, capture_output=True, text=True)
            if done.stdout.strip() == "2 idle":
                break
            time.sleep(1)
        else:
            pytest.fail(f"no two idle nodes: {done}\n{(folder / 'log').read_text()[-4000:]}")
        yield environment


def test_the_script_trains_on_two_nodes_of_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    # As the page says of nodes without a GPU.
    script = tmp_path / "slurm.sh"
    text = (ROOT / "examples" / "slurm.sh").read_text()
    text = re.sub(r"^#SBATCH --(gpus|cpus)-.*\n", "", text, flags=re.M)
    script.write_text(text)
    scripts = os.path.dirname(sys.executable)
    environment = {
        **slurm,
        "IFNAME": "lo",
        "MASTER_PORT": free_port(),
        "PATH": f"{scripts}:{slurm['PATH']}",
    }
    command = [str(FOUND["sbatch"]), "--wait", "--overcommit", f"--output={tmp_path}/out"]
    command += [str(script), str(ROOT / "examples" / "ddp_loop.py"), "--steps", "100"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    output = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    assert done.returncode == 0, done.stderr + output
    assert re.search(r"rank 0 sent [\d,]+ bytes in the last step", output), output
