"""The commands of a run: the server's, Nsight's around it, and what their environment holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsysk3.errors import InputError
from nsysk3.launch.containers import container_command
from nsysk3.run.config import Settings

SP_SWITCHES = ("SGLANG_K3_SP_COLLECTIVE", "SGLANG_K3_SP_ATTN_RES", "NSYSK3_SP")
_SP_VALUES = {"off": "000", "sglang": "110", "nsysk3": "111"}
_TORCH_SP = {"off": "off", "sglang": "nccl", "nsysk3": "nsysk3"}

# What the plan decides, under every name SGLang knows it by: the option of nsysk3 to use in its place.
_PLANNED = {
    "--tp-size": "--tp", "--tensor-parallel-size": "--tp", "--tp": "--tp",
    "--pp-size": "--pp", "--pipeline-parallel-size": "--pp", "--pp": "--pp",
    "--ep-size": "--ep", "--expert-parallel-size": "--ep", "--ep": "--ep",
    "--nnodes": "--hosts", "--node-rank": "--hosts",
    "--dist-init-addr": "cluster.address", "--nccl-init-addr": "cluster.address",
    "--host": "cluster.address", "--port": "cluster.port",
    "--model-path": "--model", "--model": "--model",
    "--chunked-prefill-size": "--chunk", "--random-seed": "load.seed", "--sp": "--sp",
}  # fmt: skip
# Options of `nsys profile` that nsysk3 sets but leaves to the user, by their short and long names.
_NSYS = (
    ("-t", "--trace", "cuda,nvtx"),
    ("-s", "--sample", "none"),
    ("", "--cpuctxsw", "none"),
    ("", "--trace-fork-before-exec", "true"),
    ("", "--cuda-graph-trace", "node"),
)
# Those that the capture and the collection depend on.
_NSYS_OURS = ("-c", "--capture-range", "--capture-range-end", "-o", "--output", "-f", "--force-overwrite")


def server_command(
    settings: Settings, args: Sequence[str], *, pp: int, tp: int, ep: int, node: int, nodes: int, meet: str, bind: str
) -> tuple[str, ...]:
    """Command of the server on one node; ``args`` are the user's own, ``meet`` is ADDRESS:PORT of the first node."""
    server, load = settings.server, settings.load
    module = "sglang.launch_server" if server.engine == "sglang" else "nsysk3.workload"
    command = list(server.command or (server.python, "-m", module))
    if server.engine == "sglang" and settings.model.path is not None:
        command += ["--model-path", settings.model.path]
    command += ["--tp-size", f"{tp}", "--pp-size", f"{pp}", "--ep-size", f"{ep}"]
    command += ["--nnodes", f"{nodes}", "--node-rank", f"{node}"]
    if nodes > 1:
        command += ["--dist-init-addr", meet]
    command += ["--host", bind, "--port", f"{settings.cluster.port}"]
    command += ["--chunked-prefill-size", f"{load.chunk}", "--random-seed", f"{load.seed}"]
    if server.engine == "torch":
        command += ["--sp", _TORCH_SP[server.sp]]
    return (*command, *args)


def check_server_args(args: Sequence[str]) -> None:
    """Raises InputError where the user's server arguments contradict the plan."""
    for arg in args:
        if option := _PLANNED.get(arg.partition("=")[0]):
            raise InputError(f"{arg} among the server's arguments: the plan decides it; use {option}")


def flag_value(args: Sequence[str], *names: str) -> str | None:
    """Value that the last of these options has among ``args``, as argparse takes it; "" for one without a value."""
    found = None
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            after = args[index + 1] if index + 1 < len(args) else "--"
            found = value if equals else "" if after.startswith("--") else after
    return found


def number(args: Sequence[str], default: int, *names: str) -> int:
    """Whole number that one of these options has among ``args``."""
    text = flag_value(args, *names)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{names[0]} {text}: must be a whole number") from error


def nsys_command(settings: Settings, report: str, *, ranged: bool) -> tuple[str, ...]:
    """Nsight's part of a command, up to the server; ``report`` is the path of the report without its suffix.

    One session a node, with every rank a child of it: SGLang opens the capture in one process of a node only.
    ``ranged`` False: it captures everything from the start, for without CUDA nothing can open a capture.
    """
    given = {option.partition("=")[0] for option in settings.nsys.options}
    if ours := sorted(given.intersection(_NSYS_OURS)):
        raise InputError(f"nsys.options: {ours[0]} is nsysk3's to set")
    command = [settings.nsys.path or "nsys", "profile"]
    for short, long, value in _NSYS:
        if not given.intersection((short, long)):  # nsys refuses an option that is there twice
            command += [short, value] if short else [f"{long}={value}"]
    if ranged:
        command += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return (*command, "-o", report, "-f", "true", *settings.nsys.options)


def in_container(settings: Settings, name: str, run_id: str, env: Mapping[str, str], scratch: str) -> tuple[str, ...]:
    """The part of a command that puts the rest into a container, on the host's network and with the model mounted."""
    options = settings.container.options
    added = [] if any(each.startswith(("--net", "--network")) for each in options) else ["--network", "host"]
    model = settings.model.path
    if model and model.startswith("/") and not any(f":{model}" in each or f"={model}" in each for each in options):
        added += ["--volume", f"{model}:{model}:ro"]
    container = settings.container.model_copy(update={"options": [*added, *options]})
    return tuple(container_command(container, name=name, run_id=run_id, env_names=sorted(env), scratch=scratch))


def server_environment(settings: Settings) -> dict[str, str]:
    """What the server's processes find in their environment besides what the host gives them.

    Raises InputError where the user's [env] contradicts another setting.
    """
    server = settings.server
    env = {"PYTHONUNBUFFERED": "1"}
    if settings.cluster.interface:
        env |= {"NCCL_SOCKET_IFNAME": settings.cluster.interface, "GLOO_SOCKET_IFNAME": settings.cluster.interface}
    env |= {"NSYSK3_MARKERS": "1" if server.markers else "0"}
    switches = dict(zip(SP_SWITCHES, _SP_VALUES[server.sp], strict=True))
    env |= switches if server.engine == "sglang" else {"NSYSK3_SP": switches["NSYSK3_SP"]}
    for name, value in settings.env.items():
        if name in ("NSYSK3_RUN", "NSYSK3_KEEPER"):
            raise InputError(f"[env] {name}: is nsysk3's own")
        if name in (*SP_SWITCHES, "NSYSK3_MARKERS") and value != env.get(name, value):
            raise InputError(f"[env] {name}={value}: use {'server.markers' if name == 'NSYSK3_MARKERS' else '--sp'}")
        env[name] = value
    _check_plugins(env, needed=server.engine == "sglang" and (server.markers or server.sp == "nsysk3"))
    return env


def _check_plugins(env: Mapping[str, str], *, needed: bool) -> None:
    allowed = env.get("SGLANG_PLUGINS")
    if needed and allowed is not None and "nsysk3" not in [name.strip() for name in allowed.split(",")]:
        raise InputError(
            f"[env] SGLANG_PLUGINS={allowed}: keeps nsysk3's plugin out of SGLang; add nsysk3 to it, or turn off "
            "server.markers and --sp nsysk3"
        )


def expected_info(
    args: Sequence[str], settings: Settings, *, pp: int, tp: int, ep: int, nodes: int
) -> dict[str, object]:
    """What the server must say of itself: the layout, and those options whose value it does not choose itself."""
    found: dict[str, object] = {
        "pp_size": pp, "tp_size": tp, "ep_size": ep, "nnodes": nodes, "chunked_prefill_size": settings.load.chunk,
    }  # fmt: skip
    for name in ("moe_runner_backend", "moe_a2a_backend", "attention_backend"):
        value = flag_value(args, "--" + name.replace("_", "-"))
        if value and value != "auto":
            found[name] = value
    for name in ("pp_max_micro_batch_size", "pp_async_batch_depth"):
        option = "--" + name.replace("_", "-")
        if flag_value(args, option):
            found[name] = number(args, 0, option)
    if share := flag_value(args, "--mem-fraction-static"):
        try:
            found["mem_fraction_static"] = float(share)
        except ValueError as error:
            raise InputError(f"--mem-fraction-static {share}: must be a number") from error
    for name in ("disable_radix_cache", "disable_custom_all_reduce"):
        if flag_value(args, "--" + name.replace("_", "-")) is not None:
            found[name] = True
    return found
