"""What an idle cluster costs: CPU seconds of every process of it over 30 s without requests, less what as many empty Ray actors use in the same run.

`python -m bench.idle` prints both, the difference in percent of one core, a line for each process, and one JSON line.
"""

import argparse
import json
import subprocess
import sys
import time

import psutil

from cli.config import load_config
from cluster.local import Cluster

EMPTY_RAY = """
import sys
from cluster.ray_runtime import empty_actors
with empty_actors(int(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def cpu_seconds(root: psutil.Process) -> dict[int, tuple[str, float]]:
    """pid -> (name, user + system seconds) for a process and all below it."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times, command = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        found[process.pid] = (" ".join(command[:4])[-70:] or process.name(), times.user + times.system)
    return found


def used(root: psutil.Process, seconds: float) -> dict[str, float]:
    """CPU seconds that each process below `root` spends while we sleep."""
    before = cpu_seconds(root)
    time.sleep(seconds)
    after = cpu_seconds(root)
    return {f"{pid} {name}": spent - before[pid][1] for pid, (name, spent) in after.items() if pid in before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="examples/local.yaml")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=10.0)
    arguments = parser.parse_args()
    config = load_config(arguments.config, ["router.http_port=0"])
    with Cluster(config):
        time.sleep(arguments.settle)
        ours = used(psutil.Process(), arguments.seconds)
    actors = 1 + sum(1 + len(node.workers) for node in config.nodes)
    baseline = subprocess.Popen([sys.executable, "-c", EMPTY_RAY, str(actors)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert baseline.stdin is not None and baseline.stdout is not None
    baseline.stdout.readline()
    time.sleep(arguments.settle)
    empty = used(psutil.Process(baseline.pid), arguments.seconds)
    baseline.stdin.close()
    baseline.wait(60)
    for name, seconds in sorted(ours.items(), key=lambda item: -item[1]):
        print(f"{100 * seconds / arguments.seconds:6.2f} %  {name}")
    cluster, ray = (100 * sum(part.values()) / arguments.seconds for part in (ours, empty))
    print(f"cluster {cluster:.2f} %, {actors} empty Ray actors {ray:.2f} %, difference {cluster - ray:.2f} % of one core")
    print(
        json.dumps({"bench": "idle", "cluster_percent": round(cluster, 2), "empty_ray_percent": round(ray, 2), "difference_percent": round(cluster - ray, 2)})
    )


if __name__ == "__main__":
    main()
