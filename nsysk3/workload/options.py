"""The command line: SGLang's names for what SGLang has, and a few of the workload's own."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nsysk3.errors import InputError
from nsysk3.workload.shape import SCALES, Shape, make_shape

logger = logging.getLogger("nsysk3.workload")


@dataclass(frozen=True)
class Options:
    """What a server was asked to be; see the help of the command line."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: float = 300.0
    host: str = "127.0.0.1"
    port: int = 30000
    chunked_prefill_size: int = 8192
    max_running_requests: int = 64
    pp_max_micro_batch_size: int | None = None
    pp_async_batch_depth: int = 0
    random_seed: int = 1
    watchdog_timeout: float = 300.0
    skip_server_warmup: bool = False
    scale: str = "medium"
    layers: int | None = None
    attn_res_block_size: int | None = None
    device: str = "auto"
    sp: str = "off"
    sp_mode: str = "auto"
    attn_res: str = "separate"
    imbalance_factor: float = 1.0
    imbalance_stage: int = 0
    jitter: float = 0.0

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.tp_size * self.pp_size

    @property
    def ranks_a_node(self) -> int:
        """Ranks, and so GPUs, on each node."""
        return self.world_size // self.nnodes

    @property
    def micro_batch_requests(self) -> int:
        """Requests that share a micro-batch at most; by default as SGLang divides them over the stages."""
        return self.pp_max_micro_batch_size or max(self.max_running_requests // self.pp_size, 1)

    @property
    def depth(self) -> int:
        """Micro-batches under way.

        One a stage and the asynchronous depth, as SGLang's pipeline has.  Without a pipeline there are two, since
        SGLang then launches a batch before it has read the result of the one before.
        """
        return max(self.pp_size + self.pp_async_batch_depth, 2)

    def shape(self) -> Shape:
        """The model's sizes."""
        return make_shape(self.scale, self.layers, self.attn_res_block_size)

    def document(self) -> dict[str, Any]:
        """As plain values, from which ``Options(**document)`` makes the same again."""
        return dataclasses.asdict(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line; what only SGLang knows is named in one log line and left out.

    Raises InputError, one line, when a value is none or the layout cannot be.
    """
    found, unknown = _parser().parse_known_args(arguments)
    if unknown:
        logger.info("not used by the torch workload: %s", " ".join(unknown))
    values = vars(found)
    values["imbalance_factor"], values["imbalance_stage"] = _imbalance(values.pop("imbalance"))
    options = Options(**values)
    check(options)
    return options


def check(options: Options) -> None:
    """Raise InputError when no server can be laid out like this."""
    shape = options.shape()
    for name in ("tp_size", "pp_size", "ep_size", "nnodes", "chunked_prefill_size", "max_running_requests"):
        _at_least(options, name, 1)
    if options.pp_max_micro_batch_size is not None:
        _at_least(options, "pp_max_micro_batch_size", 1)
    for name in ("pp_async_batch_depth", "node_rank", "jitter"):
        _at_least(options, name, 0)
    tp, pp, ep, nodes = options.tp_size, options.pp_size, options.ep_size, options.nnodes
    _divides(tp * pp, nodes, f"--tp-size {tp} x --pp-size {pp} ranks", f"--nnodes {nodes}")
    _divides(tp, ep, f"--tp-size {tp}", f"--ep-size {ep}")
    if options.node_rank >= nodes:
        raise InputError(f"--node-rank {options.node_rank}: there are --nnodes {nodes}, counted from 0")
    if nodes > 1 and not re.fullmatch(r".+:\d{1,5}", options.dist_init_addr or ""):
        raise InputError("--dist-init-addr HOST:PORT of the first node is needed with more than one node")
    if pp > shape.layers:
        raise InputError(f"--pp-size {pp}: more stages than the model's {shape.layers} layers")
    for what, size in (("attention heads", shape.heads), ("shared experts' columns", shape.shared)):
        _divides(size, tp, f"{size} {what}", f"--tp-size {tp}")
    _divides(shape.vocab, tp, f"{shape.vocab} tokens of the vocabulary", f"--tp-size {tp}")
    _divides(shape.dense, tp, f"{shape.dense} columns of the dense layer", f"--tp-size {tp}")
    _divides(shape.experts, ep, f"{shape.experts} experts", f"--ep-size {ep}")
    _divides(shape.expert, tp // ep, f"{shape.expert} columns of an expert", f"{tp // ep} ranks that share it")
    if options.imbalance_factor < 1 or options.imbalance_stage >= pp:
        raise InputError(
            f"--imbalance {options.imbalance_factor:g}@{options.imbalance_stage}: a factor of at least 1 at a stage "
            f"from 0 to {pp - 1}"
        )


def _at_least(options: Options, name: str, least: int) -> None:
    value = getattr(options, name)
    if value < least:
        raise InputError(f"--{name.replace('_', '-')} {value}: must be at least {least}")


def _divides(whole: int, parts: int, whole_said: str, parts_said: str) -> None:
    if whole % parts:
        raise InputError(f"{whole_said} do not divide by {parts_said}")


def _imbalance(text: str | None) -> tuple[float, int]:
    if text is None:
        return 1.0, 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)@(\d+)", text)
    if found is None:
        raise InputError(f"--imbalance {text}: FACTOR@STAGE, such as 1.5@1")
    return float(found[1]), int(found[2])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m nsysk3.workload", allow_abbrev=False, description="A K3-shaped prefill server.")
    defaults = Options()

    def add(*names: str, **settings: Any) -> None:
        name = names[0].lstrip("-").replace("-", "_")
        settings.setdefault("default", getattr(defaults, name, None))
        parser.add_argument(*names, dest=name, **settings)

    add("--tp-size", "--tensor-parallel-size", "--tp", type=int, help="ranks that share each layer")
    add("--pp-size", "--pipeline-parallel-size", "--pp", type=int, help="stages, one after the other")
    add("--ep-size", "--expert-parallel-size", "--ep", type=int, help="ranks of a TP group that divide the experts")
    add("--nnodes", type=int, help="machines, each with a launcher of its own")
    add("--node-rank", type=int, help="which of them this is; the first serves HTTP")
    add("--dist-init-addr", "--nccl-init-addr", metavar="HOST:PORT", help="where the nodes meet: on the first one")
    add("--dist-timeout", type=float, metavar="S", help="how long ranks wait for each other at the start")
    add("--host", help="address that HTTP is served at")
    add("--port", type=int, help="its port; 0 takes a free one and says which")
    add("--chunked-prefill-size", type=int, metavar="TOKENS", help="tokens of a micro-batch at most")
    add("--max-running-requests", type=int, metavar="N", help="requests with state on the GPUs at most")
    add("--pp-max-micro-batch-size", type=int, metavar="N", help="requests in a micro-batch at most")
    add("--pp-async-batch-depth", type=int, metavar="N", help="micro-batches under way beyond one a stage")
    add("--random-seed", type=int, metavar="N", help="of the weights and of --jitter")
    add("--watchdog-timeout", type=float, metavar="S", help="a micro-batch that takes longer ends the server")
    add("--skip-server-warmup", action="store_true", help="be ready without having run a request")
    add("--scale", choices=list(SCALES), help="sizes of the model")
    add("--layers", type=int, metavar="N", help="layers, in place of the scale's")
    add("--attn-res-block-size", type=int, metavar="N", help="layers between two writes to the bank")
    add("--device", choices=["auto", "cuda", "cpu"], help="auto: GPUs where torch sees any")
    add("--sp", choices=["off", "nccl", "nsysk3"], help="sequence parallelism around the attention residual")
    add(
        "--sp-mode", choices=["auto", "fused"], help="with --sp nsysk3: kernels where measured faster, or wherever able"
    )
    add(
        "--attn-res", choices=["separate", "fused"], help="with --sp off|nccl: score, mix and norm in one launch or not"
    )
    add("--imbalance", metavar="FACTOR@STAGE", help="a stage that does its layers' work FACTOR times")
    add("--jitter", type=float, metavar="SIGMA", help="delay every forward of every rank by |N(0, SIGMA)| milliseconds")
    return parser
