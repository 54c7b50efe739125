"""Which path SequenceParallel takes, what it says of it, and when buffers may be filled again; without a GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import BF16, assert_normed, make_case  # noqa: E402

from nsysk3.errors import InputError, MissingToolError  # noqa: E402
from nsysk3.ops import capture, fused, peers, ranges, sp  # noqa: E402
from nsysk3.ops import reference as ref  # noqa: E402
from nsysk3.ops.dispatch import Table  # noqa: E402

HIDDEN = 64


class Kernels:
    """The fused collectives of rank 0 of two: the other's partials are zero and its rows are this rank's."""

    device_name = "gpu"

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any]] = []

    def partial_buffer(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, HIDDEN, dtype=BF16)

    def reduce_scatter_attn_res(self, partial: Any, prefix: Any, bank: Any, rows: int, *rest: Any) -> Any:
        *weights, path = rest
        self.taken.append((path, None))
        normed, new = ref.reduce_scatter_attn_res([partial, torch.zeros_like(partial)], 0, prefix, bank, rows, *weights)
        return normed.to(BF16), new

    def linear_reduce_scatter_attn_res(self, x: Any, weight: Any, prefix: Any, bank: Any, rows: int, *rest: Any) -> Any:
        return self.reduce_scatter_attn_res(ref.linear(x, weight), prefix, bank, rows, *rest, "gemm")

    def attn_res_all_gather(self, prefix: Any, bank: Any, rows: int, *rest: Any) -> Any:
        *weights, write_row = rest
        self.taken.append(("gather", write_row))
        return ref.attn_res(prefix, bank, rows, *weights).to(BF16).repeat(2, 1)

    def check(self) -> None:
        self.taken.append(("check", None))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(sp, "dist", SimpleNamespace(get_rank=lambda _: 0, get_world_size=lambda _: 2))
    monkeypatch.setattr(fused, "prepare", lambda *_: (made, None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cells = {(tokens, rows): "pull" for tokens in (16, 1024) for rows in (1, 8)}
    table = Table("gpu", 2, {"date": "today"}, {"rs_attn_res": cells, "linear_rs_attn_res": {(2048, 8): "push"}})
    monkeypatch.setattr(sp, "find_table", lambda device, world: table if (device, world) == ("gpu", 2) else None)
    return made


def parallel(mode: str = "auto", **more: Any) -> sp.SequenceParallel:
    options = {"hidden": HIDDEN, "max_tokens": 4096, "max_rows": 8, "device": "cpu", **more}
    return sp.SequenceParallel(None, mode=mode, **options)  # type: ignore[arg-type]


def test_a_measured_path_is_taken(kernels: Kernels) -> None:
    it = parallel()
    case = make_case(16, 1, HIDDEN, 3, seed=1)
    mine = it.rows(16)
    normed, new = it.reduce_scatter_attn_res(case.prefix, case.prefix[mine], case.bank[mine], 3, *case.weights)
    assert kernels.taken == [("pull", None)]
    assert torch.equal(new, (2 * case.prefix[mine].double()).to(BF16))
    assert_normed(normed, ref.attn_res(new, case.bank[mine], 3, *case.weights))
    assert it.decisions == [sp.Decision("rs_attn_res", "pull", "measured fastest (today)", 16, 3)]
    it.check()
    assert kernels.taken[-1] == ("check", None)


@pytest.mark.parametrize(
    ("mode", "operation", "tokens", "rows", "dtype", "path", "why"),
    [
        ("auto", "rs_attn_res", 100, 8, BF16, "pull", "measured fastest (today)"),
        ("auto", "rs_attn_res", 2048, 8, BF16, "nccl", "not measured for so many tokens or bank rows"),
        ("auto", "attn_res_ag", 100, 8, BF16, "nccl", "not measured for so many tokens or bank rows"),
        ("auto", "linear_rs_attn_res", 2048, 8, BF16, "push", "measured fastest (today)"),
        ("fused", "rs_attn_res", 2048, 8, BF16, "push", "asked for"),
        ("fused", "attn_res_ag", 8, 8, BF16, "push", "asked for"),
        ("fused", "rs_attn_res", 15, 8, BF16, "nccl", "tokens do not divide over 2 ranks"),
        ("fused", "rs_attn_res", 0, 8, BF16, "nccl", "tokens do not divide over 2 ranks"),
        ("fused", "rs_attn_res", 16, 8, torch.float16, "nccl", "float16, not bfloat16"),
        ("fused", "rs_attn_res", 8192, 8, BF16, "nccl", "more than 4096 tokens"),
        ("fused", "rs_attn_res", 16, 9, BF16, "nccl", "more than 8 bank rows"),
        ("fused", "linear_rs_attn_res", 512, 8, BF16, "nccl", "fewer than 512 tokens a rank"),
        ("nccl", "rs_attn_res", 16, 8, BF16, "nccl", "asked for"),
    ],
)
def test_the_choice_and_its_reason(
    kernels: Kernels, mode: str, operation: str, tokens: int, rows: int, dtype: torch.dtype, path: str, why: str
) -> None:
    it = parallel(mode)
    choice = it._choose(operation, tokens, rows, dtype)
    assert (choice.path, choice.reason) == (path, why)
    assert it.takes(operation, tokens, rows, dtype) is (path != "nccl")
    said = [sp.Decision(operation, path, why, tokens, rows)] if path == "nccl" else []
    assert it.decisions == said  # what is taken is told by the call itself


def test_no_table_no_fused_path(kernels: Kernels) -> None:
    kernels.device_name = "another gpu"
    assert parallel()._choose("rs_attn_res", 16, 8, BF16).reason == "nothing measured on 2 x another gpu"
    assert parallel("fused")._choose("rs_attn_res", 16, 8, BF16).path == "push"


def test_the_gemm_is_not_captured(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert parallel()._choose("linear_rs_attn_res", 2048, 8, BF16).reason == "in a CUDA graph"


def test_a_partial_is_shared_only_where_it_may_be_pulled(kernels: Kernels) -> None:
    it = parallel()
    assert it.partial_buffer(16) is not None
    assert it.partial_buffer(8192) is None
    assert parallel("nccl").partial_buffer(16) is None


def test_linear_falls_back_to_a_product_and_its_reduce_scatter(kernels: Kernels) -> None:
    it = parallel("auto")
    case = make_case(16, 1, HIDDEN, 1, seed=2)
    x, weight = torch.randn(16, 32).to(BF16), torch.randn(HIDDEN, 32).to(BF16)
    bank = case.bank[it.rows(16)]
    _, new = it.linear_reduce_scatter_attn_res(x, weight, None, bank, 1, *case.weights)
    assert torch.allclose(new.float(), ref.linear(x, weight)[it.rows(16)].float(), rtol=2e-2, atol=2e-2)
    assert [(each.op, each.path) for each in it.decisions] == [
        ("linear_rs_attn_res", "separate"),
        ("rs_attn_res", "pull"),
    ]
    kernels.taken.clear()
    case = make_case(2048, 1, HIDDEN, 8, seed=2)
    bank = case.bank[it.rows(2048)]
    x = torch.randn(2048, 32).to(BF16)
    it.linear_reduce_scatter_attn_res(x, weight, None, bank, 8, *case.weights)
    assert kernels.taken == [("gemm", None)]


def test_calls_are_marked_with_path_and_reason(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nvtx = SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setattr(sp, "named_range", lambda text, on_gpu: ranges.named_range(text, True))
    it = parallel()
    case = make_case(16, 1, HIDDEN, 1, seed=2)
    it.reduce_scatter_attn_res(case.prefix, None, case.bank[it.rows(16)], 1, *case.weights)
    it.takes("attn_res_ag", 16, 1, BF16)
    assert said == [
        "k3.rs_attn_res M=16 Ml=8 nvb=1 P=2 epoch=1 path=pull mode=auto reason=measured fastest (today)",
        "pop",
        "k3.attn_res_ag M=16 Ml=8 nvb=1 P=2 epoch=2 path=nccl mode=auto"
        " reason=not measured for so many tokens or bank rows",
        "pop",
    ]


def test_a_fallback_is_one_line(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    it = parallel("fused")
    with caplog.at_level(logging.INFO, "nsysk3.ops"):
        for tokens in (3, 5, 7):
            it.takes("rs_attn_res", tokens, 8, BF16)
            it.takes("attn_res_ag", tokens, 8, BF16)
    (line,) = [record for record in caplog.records if record.name == "nsysk3.ops"]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("nsysk3 SP fell back: rs_attn_res by nccl (tokens do not divide over 2 ranks")
    assert len(it.decisions) == 6


def test_an_unknown_mode() -> None:
    with pytest.raises(InputError, match="no mode"):
        parallel("fast")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({}, None),
        ({"unable": ["rank 1 has no compiler"]}, "rank 1: rank 1 has no compiler"),
        ({"places": [peers.Place("b", "gpu", "2")]}, "ranks on several hosts"),
        ({"places": [peers.Place("a", "other", "2")]}, "different GPUs in one group"),
        ({"access": ["no peer access between GPUs 0 and 1"]}, "rank 1: no peer access between GPUs 0 and 1"),
        ({"failed": ["no symmetric memory (nope)"]}, "rank 1: no symmetric memory (nope)"),
        ({"raises": RuntimeError("rendezvous failed\nat line 3")}, "no symmetric memory (rendezvous failed)"),
        ({"raises": MissingToolError("no nvcc")}, "rank 0: no symmetric memory (no nvcc)"),
    ],
)
def test_all_ranks_agree_on_why_not(spoil: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    """Each answer of the other rank in turn is the bad one."""
    fails = str(spoil.get("raises", ""))
    others = {
        0: spoil.get("unable", [None]), 1: spoil.get("places", [peers.Place("a", "gpu", "2")]),
        2: spoil.get("access", [None]),
        3: ["no symmetric memory (rendezvous failed)"] if "rendezvous" in fails else spoil.get("failed", [None]),
    }  # fmt: skip
    asked = iter(range(4))
    monkeypatch.setattr(fused, "gather", lambda mine, *_: [mine, *others[next(asked)]])
    monkeypatch.setattr(fused, "_unable", lambda *_: None)
    monkeypatch.setattr(fused, "place", lambda _: peers.Place("a", "gpu", "1"))
    monkeypatch.setattr(fused, "no_peer_access", lambda *_: None)
    monkeypatch.setattr(fused, "dist", SimpleNamespace(get_world_size=lambda _: 2))

    def make(*_: Any) -> str:
        if "raises" in spoil:
            raise spoil["raises"]
        return "made"

    monkeypatch.setattr(fused, "FusedCollectives", make)
    made, why = fused.prepare(None, 7168, 64, torch.device("cpu"))  # type: ignore[arg-type]
    assert why == reason
    assert (made == "made") is (reason is None)


def test_a_buffer_is_filled_again_without_a_barrier_until_something_is_captured() -> None:
    captures, barriers = iter([0, 0, 7, 7, 7, 0, 0, 8, 8, 9, None, None, 0]), []
    now: list[int | None] = [0]

    def number() -> int | None:
        now[0] = next(captures)
        return now[0]

    order = capture.BufferOrder(lambda: barriers.append(now[0]), number)
    for _ in range(13):
        order.before_write()
    # The first call in each capture, and every call outside once there was one; where captures cannot be told apart,
    # every call in them.
    assert barriers == [7, 0, 0, 8, 9, None, None, 0]


def test_no_capture_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert capture.current_capture() == 0
