"""The life of a cluster, as `tokenmill cluster` runs it: a Ray node on this machine, what is deployed on all of them.

`up` starts `ray start --block` in the background: the supervisor of one node, which ends all of its processes with it.
It is known by a file in the node's directory, so that `down` ends this node and nothing else. Needs the extra `ray`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import ConfigError, EngineDead

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tokenmill.cluster.hooks.middlewares",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}
"""Of every node and client, unless it is set: Ray reads these when it is imported."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

try:
    import ray
    import yaml
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema
except ImportError as error:
    raise ConfigError(f"missing package {error.name}: pip install 'tokenmill[ray]'") from None

APP = "tokenmill"
IMPORT_PATH = "tokenmill.cluster.replica:build"
PORT = 6379
"""Of the head node, for other nodes."""
OBJECT_STORE_BYTES = 128 << 20
"""Requests and answers do not pass through Ray's object store."""
START_S, STOP_S, DEPLOY_S = 120.0, 90.0, 1800.0
LOOK_S = 0.2


# -- nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalNode:
    """A node that `up` has started on this machine."""

    pid: int
    address: str
    """Of the cluster: the head node's."""


def default_directory() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"tokenmill-{user}"


def up(
    directory: Path,
    *,
    join: str | None = None,
    port: int = PORT,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    node_ip: str | None = None,
) -> LocalNode:
    """Start a node: the head of a new cluster, or one that joins the cluster at this address."""
    running = find(directory)
    if running is not None:
        raise ConfigError(f"a node of {running.address} runs already (pid {running.pid}); use `tokenmill cluster down`")
    _own(directory)
    _ensure_token(is_new=join is None)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if join is None:
        command += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"]
    else:
        command += [f"--address={join}", f"--temp-dir={directory}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    for name, value in (("num-cpus", num_cpus), ("num-gpus", num_gpus), ("node-ip-address", node_ip)):
        command += [] if value is None else [f"--{name}={value}"]
    log = directory / "node.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(os.environ),
            start_new_session=True, cwd=directory,
        )  # fmt: skip
    began = time.monotonic()
    while (address := _address(directory, join, port, node_ip)) is None or not _is_started(log):
        if process.poll() is not None:
            raise EngineDead(f"the node did not start: {_problem_in(log)}; see {log}")
        if time.monotonic() - began > START_S:
            process.terminate()
            raise EngineDead(f"the node has not started after {START_S:.0f} s; see {log}")
        time.sleep(LOOK_S)
    node = LocalNode(process.pid, address)
    _file(directory).write_text(json.dumps(asdict(node)))
    return node


def _address(directory: Path, join: str | None, port: int, node_ip: str | None) -> str | None:
    """That of the cluster, once it is known."""
    if join is not None:
        return join
    with suppress(OSError):
        return (directory / "ray_current_cluster").read_text().strip() or None
    return None if node_ip is None else f"{node_ip}:{port}"


def _is_started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text(errors="replace")


def _problem_in(log: Path) -> str:
    """The last exception, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (exceptions or lines or ["it said nothing"])[-1]


def _own(directory: Path) -> None:
    """A directory that nobody else can have prepared."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise ConfigError(f"{directory} is not a directory of this user; use --dir")


def _ensure_token(*, is_new: bool) -> None:
    """Ray's own place for the token that all nodes and clients of a cluster have: whoever has it can run code there."""
    if os.environ["RAY_AUTH_MODE"] != "token" or os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return
    path = Path.home() / ".ray" / "auth_token"
    if path.exists():
        return
    if not is_new:
        raise ConfigError(f"copy {path} from the head node: the cluster requires its token")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def _file(directory: Path) -> Path:
    return directory / "node.json"


def find(directory: Path) -> LocalNode | None:
    """The node of this directory, if it runs."""
    try:
        node = LocalNode(**json.loads(_file(directory).read_text()))
        os.kill(node.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    with suppress(OSError):  # a zombie has ended; a container's first process may never reap it
        if Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
    return node


def down(directory: Path, *, is_last: bool = True) -> None:
    """End the node of this directory, and with `is_last` all that is deployed on the cluster before that.

    Running requests have the grace period of their server.
    """
    node = find(directory)
    if node is None:
        raise ConfigError(f"no node of {directory} is running")
    if is_last:
        with suppress(EngineDead), connected(node.address):
            _delete_all()
            serve.shutdown()
    with suppress(ProcessLookupError):
        os.kill(node.pid, signal.SIGTERM)
    _wait(lambda: find(directory) is None, STOP_S, f"the node (pid {node.pid}) does not end")
    _file(directory).unlink(missing_ok=True)


def _delete_all() -> None:
    """Stop what is deployed before the proxies end, which have the connections of its running requests."""
    details = _details().get("applications", {})
    if not details:
        return
    graces = [
        float((deployment["deployment_config"] or {}).get("graceful_shutdown_timeout_s") or 0.0)
        for application in details.values()
        for deployment in application["deployments"].values()
    ]
    _get_global_client().delete_apps(list(details), blocking=False)
    with suppress(EngineDead):  # it is ended all the same
        _wait(lambda: not serve.status().applications, max(graces, default=0.0) + STOP_S, "replicas are left")


def _wait(is_done: Callable[[], bool], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            raise EngineDead(f"{problem} after {seconds:.0f} s")
        time.sleep(LOOK_S)


def address_of(directory: Path, address: str | None) -> str:
    """The cluster that a command is for."""
    if address is not None:
        return address
    node = find(directory)
    if node is None:
        raise ConfigError("no node runs on this machine: use `tokenmill cluster up`, or --address")
    return node.address


@contextmanager
def connected(address: str) -> Iterator[None]:
    """As a client of the cluster; `EngineDead` if there is none."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address, namespace="serve", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineDead(f"no cluster at {address}: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


# -- deployments ------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> ServeDeploySchema:
    """A Serve configuration file, with our defaults in place of Serve's; `ConfigError` says what is wrong with it."""
    from tokenmill.cluster.replica import DEPLOYMENT, WHERE, ReplicaSettings, policy

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not isinstance(content.get("applications"), list):
        raise ConfigError(f"{path} has no list of applications")
    http = content.setdefault("http_options", {})
    http.setdefault("host", "127.0.0.1")
    for application in content["applications"]:
        application.setdefault("name", APP)
        application.setdefault("route_prefix", "/")
        if application.setdefault("import_path", IMPORT_PATH) != IMPORT_PATH:
            continue
        if application["route_prefix"] != "/":
            raise ConfigError(f"{path}: route_prefix must be /, not {application['route_prefix']!r}")
        settings = ReplicaSettings.read(application.get("args") or {})
        if not settings.is_protected and http["host"] not in ("127.0.0.1", "::1", "localhost"):
            what = f"{path}: http_options: binding to {http['host']} requires API keys"
            raise ConfigError(f"{what} ({WHERE}: server: keys_file, or TOKENMILL_API_KEY), or insecure: true")
        for deployment in application.get("deployments", []):
            deployment.setdefault("name", DEPLOYMENT)
            if isinstance(scaling := deployment.get("autoscaling_config"), dict):
                scaling.setdefault("policy", policy().model_dump())
    try:
        return ServeDeploySchema.model_validate(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {_problem(error)}") from None


def _problem(error: ValueError) -> str:
    """What pydantic found first."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def deploy(file: ServeDeploySchema, tell: Callable[[str], None] = lambda _: None) -> str:
    """Have the cluster run what the file says, and wait for it; the URL of its proxies.

    A deployment that changes is rolled over replica by replica; one that does not stays as it is.
    """
    http = file.http_options
    options = {name: getattr(http, name) for name in ("host", "port", "keep_alive_timeout_s", "request_timeout_s")}
    options |= {name: getattr(http, name) for name in ("ssl_keyfile", "ssl_certfile") if getattr(http, name, None)}
    serve.start(proxy_location=file.proxy_location, http_options=options)
    bound = _get_global_client().http_config  # Serve ignores other options while it runs
    if (bound.host, bound.port) != (http.host, http.port):
        what = f"the proxies listen on {bound.host}:{bound.port}, not on {http.host}:{http.port}"
        raise ConfigError(f"{what}: `tokenmill cluster down` ends them; host and port are set when they start")
    _get_global_client().deploy_apps(file)
    names, told, deadline = {one.name for one in file.applications}, "", time.monotonic() + DEPLOY_S
    while True:
        found = {name: one for name, one in serve.status().applications.items() if name in names}
        states = "; ".join(f"{name}: {_state(one)}" for name, one in sorted(found.items()))
        if states != told:
            tell(states)
            told = states
        failed = [one for one in found.values() if one.status in ("DEPLOY_FAILED", "UNHEALTHY")]
        if failed:
            raise EngineDead(f"the deployment failed: {_reason(failed[0])}")
        if set(found) == names and all(one.status == "RUNNING" for one in found.values()):
            scheme = "https" if options.get("ssl_certfile") else "http"
            return f"{scheme}://{http.host}:{http.port}"
        if time.monotonic() > deadline:
            raise EngineDead(f"the deployment is not running after {DEPLOY_S:.0f} s: {states}")
        time.sleep(LOOK_S)


def _state(application: Any) -> str:
    counts = [
        f"{count} {state.lower()}"
        for one in application.deployments.values()
        for state, count in sorted(one.replica_states.items())
        if count
    ]
    return f"{application.status.lower()} ({', '.join(counts) or 'no replicas'})"


def _reason(application: Any) -> str:
    """The last line of the traceback that Serve reports."""
    messages = [one.message for one in application.deployments.values() if one.message] or [application.message]
    lines = [line.strip() for line in "\n".join(messages).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "EngineDead" in line), "".join(lines[-1:]))


@dataclass(frozen=True)
class ClusterStatus:
    address: str
    nodes: list[dict[str, Any]]
    proxies: dict[str, str]
    """By node."""
    applications: dict[str, Any]
    replicas: list[dict[str, Any]] = field(default_factory=list)


def status(address: str) -> ClusterStatus:
    """What the cluster runs."""
    nodes = [
        {
            "node": one["NodeID"],
            "address": one["NodeManagerAddress"],
            "alive": one["Alive"],
            "cpus": one["Resources"].get("CPU", 0),
            "gpus": one["Resources"].get("GPU", 0),
        }
        for one in ray.nodes()
    ]
    details = _details()
    applications: dict[str, Any] = {}
    replicas: list[dict[str, Any]] = []
    for name, application in details.get("applications", {}).items():
        applications[name] = {"status": _word(application["status"]), "message": application["message"]}
        for deployment in application["deployments"].values():
            replicas += [
                {
                    "replica": one["replica_id"],
                    "application": name,
                    "state": _word(one["state"]),
                    "node": one.get("node_id"),
                    "pid": one.get("pid"),
                }
                for one in deployment["replicas"]
            ]
    proxies = {node: _word(one["status"]) for node, one in (details.get("proxies") or {}).items()}
    return ClusterStatus(address, nodes, proxies, applications, replicas)


def _word(status: Any) -> str:
    """Of one of Serve's enumerations."""
    return str(getattr(status, "value", status))


def _details() -> Mapping[str, Any]:
    try:
        return _get_global_client().get_serve_details()  # type: ignore[no-any-return]
    except Exception as error:
        if type(error).__name__ not in ("RayServeException", "ActorDiedError"):
            raise
        return {}  # nothing was deployed


def drain(node: str, seconds: float, address: str) -> None:
    """Move all replicas off a node, and wait until that is done. Serve starts others elsewhere first."""
    found = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeID"].startswith(node)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} nodes begin with {node!r}; `tokenmill cluster status` lists them")
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "tokenmill cluster drain"]
    deadline = ["--deadline-remaining-seconds", str(max(1, round(seconds)))]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", found[0]]
    done = subprocess.run([*command, *reason, *deadline], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EngineDead(f"node {found[0]} cannot be drained: {lines[-1] if lines else done.returncode}")
    left = f"node {found[0]} still has replicas"
    _wait(lambda: all(one["node"] != found[0] for one in status(address).replicas), seconds, left)
