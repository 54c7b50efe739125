"""The parts of the torch workload's model against what they are meant to compute."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array

import pytest

torch = pytest.importorskip("torch", reason="the workload needs PyTorch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from nsysk3.ops import reference  # noqa: E402
from nsysk3.workload.attn_res import read_separately  # noqa: E402
from nsysk3.workload.delays import delay_ms, layer_passes  # noqa: E402
from nsysk3.workload.groups import make_facts  # noqa: E402
from nsysk3.workload.kda import CHUNK, delta_rule  # noqa: E402
from nsysk3.workload.model import Stage  # noqa: E402
from nsysk3.workload.moe import LatentMoE, situ  # noqa: E402
from nsysk3.workload.options import Options  # noqa: E402
from nsysk3.workload.paths import Stream, WholeStream  # noqa: E402
from nsysk3.workload.requests import Requests  # noqa: E402
from nsysk3.workload.scheduler import MicroBatch, Piece  # noqa: E402
from nsysk3.workload.shape import make_shape  # noqa: E402
from nsysk3.workload.weights import Source  # noqa: E402

CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 11 * CHUNK + 5])
def test_the_delta_rule_is_its_recurrence(tokens: int) -> None:
    heads, dim = 2, 8
    q, v = random(tokens, heads, dim, seed=1), random(tokens, heads, dim, seed=2)
    k = torch.nn.functional.normalize(random(tokens, heads, dim, seed=3), dim=-1)
    log_decay = -4.0 / CHUNK * torch.sigmoid(random(tokens, heads, dim, seed=4))
    beta, memory = torch.sigmoid(random(tokens, heads, seed=5)), random(heads, dim, dim, seed=6)
    state, expected = memory.double(), []
    for t in range(tokens):
        state = log_decay[t].double().exp().unsqueeze(-1) * state
        known = torch.einsum("hkv,hk->hv", state, k[t].double())
        change = beta[t].double().unsqueeze(-1) * (v[t].double() - known)
        state = state + k[t].double().unsqueeze(-1) * change.unsqueeze(-2)
        expected.append(torch.einsum("hkv,hk->hv", state, q[t].double()) / dim**0.5)
    out, last = delta_rule(q, k, v, log_decay, beta, memory)
    torch.testing.assert_close(out, torch.stack(expected).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, state.float(), rtol=1e-4, atol=1e-4)


def test_the_separate_read_is_the_reference_and_writes_the_bank() -> None:
    prefix, bank = random(5, 48, seed=1), random(5, 3, 48, seed=2)
    score, norm = random(48, seed=3), random(48, seed=4)
    for rows in (0, 2):
        before = bank.clone()
        found = read_separately(prefix, bank, rows, score, norm, 1e-5, write_row=2)
        torch.testing.assert_close(found, reference.attn_res(prefix, before, rows, score, norm, 1e-5).float())
        assert torch.equal(bank[:, 2], prefix)
        assert torch.equal(bank[:, :2], before[:, :2])


def test_experts_are_the_sum_over_the_chosen_and_their_shares_add_up() -> None:
    shape, source = make_shape("small"), Source(1, CPU, torch.float32)
    x = random(9, shape.hidden, seed=1)
    alone = LatentMoE("mlp", shape, make_facts(Options(), 0, 0), source)
    weights, chosen = alone._route(x)
    latent = alone.latent_proj(x)
    routed = torch.zeros(9, shape.latent)
    for token in range(9):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            hidden = situ(alone.expert_gate_up[expert] @ latent[token])
            routed[token] += weight * (alone.expert_down[expert] @ hidden)
    part = alone.local(x)
    torch.testing.assert_close(part[:, : shape.latent], routed, rtol=1e-4, atol=1e-4)
    for options in (Options(tp_size=4), Options(tp_size=4, ep_size=2), Options(tp_size=4, ep_size=4)):
        parts = [LatentMoE("mlp", shape, make_facts(options, rank, rank), source).local(x) for rank in range(4)]
        torch.testing.assert_close(sum(parts), part, rtol=1e-4, atol=1e-4)


def flops_of_last_stage(options: Options) -> int:
    shape, facts = options.shape(), make_facts(options, options.pp_size - 1, 0)
    stage = Stage(options, shape, facts, Source(1, CPU, torch.float32), None)
    stream = Stream(random(64, shape.hidden, seed=1), random(64, 2, shape.hidden, seed=2), 64)
    batch = MicroBatch(1, 0, "extend", (Piece(1, 0, 64, 64),), (), array("i"))
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        stage.run_layers(stream, batch, Requests(), WholeStream(None, read_separately))
    return int(counter.get_total_flops())


def test_imbalance_multiplies_the_work_of_its_stage_only() -> None:
    other = Options(scale="small", layers=2, pp_size=2, imbalance_factor=3, imbalance_stage=0)
    multiplied = Options(scale="small", layers=2, pp_size=2, imbalance_factor=3, imbalance_stage=1)
    # What follows the MoE's sum over ranks is not done again.
    assert 2.7 < flops_of_last_stage(multiplied) / flops_of_last_stage(other) <= 3


@pytest.mark.parametrize(("factor", "layers", "passes"), [(1.0, 4, 4), (1.5, 4, 6), (1.25, 4, 5), (2.5, 3, 7)])
def test_passes_add_up_to_the_factor(factor: float, layers: int, passes: int) -> None:
    options = Options(imbalance_factor=factor, imbalance_stage=1)
    found = layer_passes(options, 1, layers)
    assert (sum(found), min(found) >= 1, max(found) - min(found) <= 1) == (passes, True, True)
    assert layer_passes(options, 0, layers) == [1] * layers


def test_delays_are_known_beforehand() -> None:
    delays = [delay_ms(7, 3.0, forward, rank) for forward in range(200) for rank in range(2)]
    assert delays == [delay_ms(7, 3.0, forward, rank) for forward in range(200) for rank in range(2)]
    assert len(set(delays)) == len(delays)
    assert sum(delays) / len(delays) == pytest.approx(3.0 * (2 / torch.pi) ** 0.5, rel=0.15)
    assert delay_ms(7, 0.0, 1, 1) == 0.0


def test_the_launcher_does_without_torch_and_without_the_analysis() -> None:
    script = "import sys, json, nsysk3.workload.launcher; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert not {"torch", "polars", "pydantic", "plotly", "sqlalchemy", "numpy"}.intersection(loaded)


def test_a_rank_does_without_the_analysis() -> None:
    script = "import sys, json, nsysk3.workload.setup; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert not {"polars", "pydantic", "plotly", "sqlalchemy", "nsysk3.analysis"}.intersection(loaded)
