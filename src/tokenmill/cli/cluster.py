"""`tokenmill cluster`: servers on a Ray cluster, behind Ray Serve."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tokenmill.cluster.control import ClusterStatus

cluster = typer.Typer(help="Run servers on a Ray cluster (docs/guides/cluster.md).", no_args_is_help=True)

Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Directory of this machine's node.", show_default="tokenmill-UID in the temporary one"),
]
Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of the cluster's head node.", show_default="that of this machine's node"),
]
NODE_CHARS = 8


@cluster.command()
def up(
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Join this cluster's head node.", show_default="start a new cluster"),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of a head node, for other nodes.")] = 6379,
    num_cpus: Annotated[
        int | None, typer.Option(min=0, help="CPUs for replicas on this node.", show_default="all")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs for replicas on this node.", show_default="all")
    ] = None,
    node_ip: Annotated[
        str | None, typer.Option(help="Address of this node for other nodes.", show_default="detected")
    ] = None,
    directory: Directory = None,
) -> None:
    """Start a node of a cluster on this machine, in the background."""
    from tokenmill.cluster import control

    folder = directory or control.default_directory()
    node = control.up(folder, join=join, port=port, num_cpus=num_cpus, num_gpus=num_gpus, node_ip=node_ip)
    print(f"node of {node.address} started (pid {node.pid}, log {folder / 'node.log'})")
    if join is None:
        print(f"to add another machine: tokenmill cluster up --join {node.address}")


@cluster.command()
def deploy(
    file: Annotated[Path, typer.Argument(help="Ray Serve configuration file (YAML).", dir_okay=False)],
    address: Address = None,
    directory: Directory = None,
) -> None:
    """Deploy what a file describes, and wait until it runs. A changed deployment is rolled over."""
    from tokenmill.cluster import control

    wanted = control.read_file(file)
    with control.connected(control.address_of(directory or control.default_directory(), address)):
        url = control.deploy(wanted, lambda what: print(what, file=sys.stderr, flush=True))
    print(f"{url}/v1")


@cluster.command()
def status(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    directory: Directory = None,
) -> None:
    """Show nodes, proxies and replicas."""
    from tokenmill.cluster import control

    where = control.address_of(directory or control.default_directory(), address)
    with control.connected(where):
        found = control.status(where)
    print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: ClusterStatus) -> list[str]:
    lines = [f"cluster {found.address}"]
    for node in found.nodes:
        state = "alive" if node["alive"] else "dead"
        proxy = found.proxies.get(node["node"], "none").lower()
        size = f"{node['cpus']:g} CPUs, {node['gpus']:g} GPUs"
        lines.append(f"  node {node['node'][:NODE_CHARS]}  {node['address']}  {state}  {size}  proxy {proxy}")
    for name, application in found.applications.items():
        lines.append(f"application {name}  {application['status'].lower()}")
        for one in found.replicas:
            if one["application"] == name:
                where = f"node {(one['node'] or '-')[:NODE_CHARS]}  pid {one['pid'] or '-'}"
                lines.append(f"  replica {one['replica']}  {one['state'].lower()}  {where}")
    return lines if found.applications else [*lines, "nothing is deployed"]


@cluster.command()
def drain(
    node: Annotated[str, typer.Argument(help="Node id, or how it begins (see `tokenmill cluster status`).")],
    timeout: Annotated[float, typer.Option(min=1, help="Time for its replicas to move (s).")] = 600.0,
    address: Address = None,
    directory: Directory = None,
) -> None:
    """Move all replicas off a node, so that it can be shut down: their running requests end first."""
    from tokenmill.cluster import control

    where = control.address_of(directory or control.default_directory(), address)
    with control.connected(where):
        control.drain(node, timeout, where)
    print(f"node {node} has no replicas")


@cluster.command()
def down(
    node_only: Annotated[
        bool, typer.Option("--node-only", help="End this machine's node; the rest of the cluster goes on.")
    ] = False,
    directory: Directory = None,
) -> None:
    """End what is deployed and this machine's node."""
    from tokenmill.cluster import control

    control.down(directory or control.default_directory(), is_last=not node_only)
