"""The references agree with each other: whatever order, cut or slicing, one value."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the operations need PyTorch")

from ops_cases import BF16, error, make_case  # noqa: E402
from ops_stack import cut, make_layers, run_sliced, run_whole, start  # noqa: E402

from nsysk3.ops import reference as ref  # noqa: E402


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("scale", [1.0, 3e-4])
def test_online_softmax_is_the_softmax(rows: int, scale: float) -> None:
    case = make_case(6, 1, 200, rows, seed=rows, scale=scale)
    truth = ref.attn_res(case.prefix, case.bank, rows, *case.weights)
    assert error(ref.attn_res_online(case.prefix, case.bank, rows, *case.weights, acc=torch.float64), truth) < 1e-12
    assert error(ref.attn_res_online(case.prefix, case.bank, rows, *case.weights), truth) < 1e-5


def test_the_order_of_the_rows_does_not_matter_and_their_weights_do() -> None:
    case = make_case(4, 1, 128, 5, seed=3)
    rows = [case.bank[:, j] for j in range(5)] + [case.prefix]
    truth = ref.attn_res(case.prefix, case.bank, 5, *case.weights)
    shuffled = torch.stack([rows[j] for j in (3, 5, 0, 1, 4)], 1)
    assert error(ref.attn_res(rows[2], shuffled, 5, *case.weights), truth) < 1e-12
    plain = ref.attn_res(case.prefix, case.bank, 5, torch.zeros(128), None)
    assert error(plain, torch.stack(rows).double().mean(0)) < 1e-12
    assert error(ref.attn_res(case.prefix, case.bank, 5, case.score_weight, None), plain) > 0.1


def test_without_rows_it_is_the_norm() -> None:
    case = make_case(4, 1, 128, 0, seed=4, scale=3e-4)
    norm = torch.nn.functional.rms_norm(case.prefix.double(), (128,), case.norm_weight.double(), case.eps)
    assert error(ref.attn_res(case.prefix, case.bank, 0, *case.weights), norm) < 1e-12


def test_a_wrong_denominator_shows_only_near_eps() -> None:
    """Why every test of a kernel has a tiny scale: the last norm cancels the softmax's denominator elsewhere."""

    def wrong_by(scale: float) -> float:
        case = make_case(4, 1, 256, 3, seed=5, scale=scale)
        mixed = ref.attn_res(case.prefix, case.bank, 3, case.score_weight, None) * 3
        wrong = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + case.eps) * case.norm_weight.double()
        return error(wrong, ref.attn_res(case.prefix, case.bank, 3, *case.weights))

    assert wrong_by(1.0) < 1e-5
    assert wrong_by(3e-4) > 0.1


def test_rows_of_the_bank_follow_the_layers() -> None:
    written = 0
    for layer in range(93):
        assert ref.rows_at_attention(layer) == written
        written += ref.writes_bank(layer)
        assert ref.rows_at_mlp(layer) == written
    assert written == 8


@pytest.mark.parametrize(("tokens", "world"), [(8, 4), (7, 3), (2, 4), (0, 2)])
def test_every_row_has_one_owner(tokens: int, world: int) -> None:
    rows = [range(*ref.local_rows(tokens, rank, world).indices(tokens)) for rank in range(world)]
    assert [row for each in rows for row in each] == list(range(tokens))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.parametrize("world", [2, 3, 8])
def test_reduce_scatter_rounds_as_it_says(world: int) -> None:
    case = make_case(5 * world + 1, world, 256, 0, seed=world)
    truth = torch.stack([p.double() for p in case.partials]).sum(0)
    once, through, hop = (
        torch.cat([ref.reduce_scatter(case.partials, r, rounds=how) for r in range(world)])
        for how in ("once", "sum", "hop")
    )
    assert torch.equal(once, truth)
    assert torch.equal(through, truth.to(BF16).double())
    assert error(through, truth) <= error(hop, truth) < 4 * error(through, truth)


def test_reading_then_gathering_is_gathering_then_reading() -> None:
    case = make_case(12, 1, 256, 2, seed=7)
    mine = [ref.local_rows(12, rank, 4) for rank in range(4)]
    banks, bank = [case.bank[each].clone() for each in mine], case.bank.clone()
    prefixes = [case.prefix[each] for each in mine]
    sliced = ref.attn_res_all_gather(prefixes, banks, 2, *case.weights, write_row=2)
    whole = ref.attn_res_all_gather([case.prefix], [bank], 2, *case.weights, write_row=2)
    assert torch.equal(sliced, whole)
    assert torch.equal(torch.cat(banks), bank)
    assert torch.equal(bank[:, 2], case.prefix)


def test_linear_then_reduce_scatter_is_the_whole_product() -> None:
    g = torch.Generator().manual_seed(3)
    xs = [torch.randn(32, 32, generator=g).to(BF16) for _ in range(4)]
    weights = [(torch.randn(96, 32, generator=g) / 11).to(BF16) for _ in range(4)]
    product = torch.cat([x.double() for x in xs], 1) @ torch.cat([w.double() for w in weights], 1).t()
    for rank in range(4):
        mine = product[ref.local_rows(32, rank, 4)]
        assert error(ref.linear_reduce_scatter(xs, weights, rank, exact=True), mine) < 1e-12
        assert 1e-4 < error(ref.linear_reduce_scatter(xs, weights, rank), mine) < 4e-3


@pytest.mark.parametrize(("tokens", "world"), [(8, 2), (7, 3)])
def test_slices_give_the_whole_wherever_the_pipeline_is_cut(tokens: int, world: int) -> None:
    layers = make_layers(7, world, 48, seed=9)
    head = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(1)).to(BF16)
    whole = run_whole(start(head, 3), layers, block=3)
    for at in range(8):
        before = run_whole(start(head, 3), layers[:at], block=3)
        # What the boundary hands over: each rank's rows of the head and of the valid part of the bank, nothing else.
        after = run_sliced(cut(before, world, slots=3), layers[at:], block=3, first=at)
        assert torch.equal(torch.cat([each.head for each in after]), whole.head)
        assert torch.equal(torch.cat([each.bank for each in after]), whole.bank)


def test_bytes_at_a_boundary() -> None:
    said = ref.boundary_bytes(64, 3, 4, hidden=32)
    head, bank = torch.empty(64, 32, dtype=BF16), torch.empty(64, 3, 32, dtype=BF16)
    whole = head.nbytes + bank.nbytes
    assert said["sent"] == whole // 4
    assert said["full_gathered"] + said["sent"] == whole  # with what it got itself, a rank then has all
    assert said["full_copied"] == 2 * bank.nbytes
    assert said["sliced_gathered"] == head.nbytes * 3 // 4
