"""The operations on GPUs: one in this process, two in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import BF16, Case, assert_normed, make_case  # noqa: E402
from ops_processes import run_ranks  # noqa: E402

from nsysk3.ops import attn_res  # noqa: E402
from nsysk3.ops import reference as ref  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def backends(hidden: int, dtype: torch.dtype) -> list[attn_res.Backend]:
    fits = hidden == 7168 and dtype == BF16
    cuda: list[attn_res.Backend] = ["cuda"] if fits and attn_res.cuda_unavailable() is None else []
    return [*cuda, *(["triton"] if find_spec("triton") else []), "torch"]  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def usable() -> None:
    """A kernel that failed takes the process's GPU with it: what follows says no more than that."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.skip(f"a kernel of a test before failed: {str(error).splitlines()[0]}")


def finished(what: str) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.fail(f"{what}: {str(error).splitlines()[0]}")


def check(case: Case, backend: attn_res.Backend, add: bool, write: bool) -> tuple[torch.Tensor, torch.Tensor]:
    bank = case.bank.clone()
    into, addend = case.rows if write else None, case.partials[0]
    arguments = (bank, case.rows, *case.weights, into)
    prefix = wanted = case.prefix
    if add:
        wanted = (case.prefix.double() + addend.double()).to(case.prefix.dtype)
        normed, prefix = attn_res.attn_res_add_norm(case.prefix, addend, *arguments, backend=backend)
    else:
        normed = attn_res.attn_res_norm(case.prefix, *arguments, backend=backend)
    finished(f"{backend}, {case.rows} rows of {tuple(case.prefix.shape)}, add {add}, write {write}")
    assert torch.equal(prefix, wanted)
    assert_normed(normed, ref.attn_res(wanted, case.bank, case.rows, *case.weights))
    if write:
        assert torch.equal(bank[:, case.rows], wanted)
        bank[:, case.rows] = case.bank[:, case.rows]
    assert torch.equal(bank.view(torch.int16), case.bank.view(torch.int16)) or case.bank.dtype == torch.float32
    return normed, wanted


@pytest.mark.parametrize("rows", [0, 1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 7, 301])
@pytest.mark.parametrize("scale", [1.0, 3e-4])
def test_every_implementation_is_the_reference(rows: int, tokens: int, scale: float) -> None:
    for number, backend in enumerate(backends(7168, BF16)):
        slot_major = bool((rows + number) % 2)
        case = make_case(tokens, 1, 7168, rows, seed=tokens + rows, scale=scale, slot_major=slot_major, device="cuda")
        for add, write in ((False, False), (True, True), (True, False), (False, True)):
            first, _ = check(case, backend, add, write)
            again, _ = check(case, backend, add, write)
            assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [96, 1024, 7168])
def test_any_size_and_type(hidden: int, dtype: torch.dtype) -> None:
    case = make_case(33, 1, hidden, 3, seed=hidden, dtype=dtype, device="cuda")
    for backend in backends(hidden, dtype):
        check(case, backend, True, True)
    attn_res.attn_res_norm(case.prefix, case.bank, 3, *case.weights)  # what auto takes for it runs


def test_every_variant_of_the_cuda_kernel() -> None:
    if reason := attn_res.cuda_unavailable():
        pytest.skip(reason)
    from nsysk3.ops import cuda

    case = make_case(700, 1, 7168, 8, seed=9, scale=3e-4, device="cuda")
    wanted = (case.prefix.double() + case.partials[0].double()).to(BF16)
    for variant in (0, cuda.MANY, None):
        normed, prefix = cuda.attn_res(
            case.prefix, case.bank, 8, *case.weights, addend=case.partials[0], write_row=8, variant=variant
        )
        finished(f"variant {variant}")
        assert torch.equal(prefix, wanted)
        assert torch.equal(case.bank[:, 8], wanted)
        assert_normed(normed, ref.attn_res(wanted, case.bank, 8, *case.weights))


def test_in_a_graph() -> None:
    for backend in backends(7168, BF16)[:-1]:
        case = make_case(64, 1, 7168, 5, seed=1, device="cuda")
        attn_res.attn_res_norm(case.prefix, case.bank, 5, *case.weights, backend=backend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            normed = attn_res.attn_res_norm(case.prefix, case.bank, 5, *case.weights, backend=backend)
        for seed in (2, 3):
            fresh = make_case(64, 1, 7168, 5, seed=seed, device="cuda")
            case.prefix.copy_(fresh.prefix)
            case.bank.copy_(fresh.bank)
            normed.fill_(float("nan"))
            graph.replay()
            assert_normed(normed, ref.attn_res(fresh.prefix, fresh.bank, 5, *case.weights))


def test_what_a_kernel_cannot_read_is_copied() -> None:
    wide = torch.full((9, 3, 7168 + 3), float("nan"), dtype=BF16, device="cuda")
    case = make_case(9, 1, 7168, 2, seed=4, slots=3, device="cuda")
    wide[..., :7168] = case.bank
    bank = wide[..., :7168]  # rows that start anywhere
    for backend in backends(7168, BF16):
        normed = attn_res.attn_res_norm(case.prefix, bank, 2, *case.weights, write_row=2, backend=backend)
        assert_normed(normed, ref.attn_res(case.prefix, case.bank, 2, *case.weights))
        finished(backend)
        assert torch.equal(bank[:, 2], case.prefix)
    place = torch.empty(9 * 7168 + 1, dtype=BF16, device="cuda")
    odd = place[1:].view(9, 7168).copy_(case.prefix)  # two bytes beside where a kernel can read
    score, norm, eps = case.weights
    weight = torch.empty(7169, dtype=BF16, device="cuda")[1:].copy_(norm)
    for backend in backends(7168, BF16):
        normed = attn_res.attn_res_norm(odd, case.bank, 2, score, weight, eps, backend=backend)
        finished(backend)
        assert_normed(normed, ref.attn_res(case.prefix, case.bank, 2, *case.weights))


NAMES = (
    "every path", "operations", "linear", "graphs", "soak", "falls back", "measured", "put", "boundary by NCCL",
    "a peer that never comes",
)  # fmt: skip


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    if reason := attn_res.cuda_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(Path(__file__).with_name("ops_gpu_ranks.py"), 2, folder, request.param, str(folder))


@two
@pytest.mark.parametrize("said", ["straight"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus(said: dict[str, list[str]], name: str) -> None:
    assert said[name] == [], "\n".join(said[name])


@two
@pytest.mark.parametrize("said", ["swap"], indirect=True)
@pytest.mark.parametrize("name", NAMES[:2])
def test_on_two_gpus_in_the_other_order(said: dict[str, list[str]], name: str) -> None:
    assert said[name] == [], "\n".join(said[name])
