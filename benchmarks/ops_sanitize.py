#!/usr/bin/env python3
"""Every kernel once, small, on one GPU, for compute-sanitizer: what a peer would send is there before it starts.

usage: compute-sanitizer --tool memcheck|racecheck ops_sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402

from nsysk3.ops import cuda, reference  # noqa: E402
from nsysk3.ops.cuda_workspace import Workspace, workspace_bytes  # noqa: E402

# Two CTAs, so that each takes several tokens and comes round its ring.
TOKENS, ROWS, EPS, LIMIT, GRID = 24, 5, 1e-6, 6e-3, 2


def main() -> int:
    reason = cuda.available()
    if reason:
        print(f"nothing to check: {reason}", file=sys.stderr)
        return 3
    device = torch.device("cuda", 0)
    torch.manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    size = workspace_bytes(2, TOKENS)
    mine, theirs = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    ws = Workspace(mine, [mine.data_ptr(), theirs.data_ptr()], 0, TOKENS)
    words = mine.view(torch.int32)
    words[: ws.layout.partials // 4].fill_(1000)  # every epoch a peer could be waited for
    local = TOKENS // 2
    partial, prefix, bank = randn(TOKENS, cuda.HIDDEN), randn(local, cuda.HIDDEN), randn(local, 8, cuda.HIDDEN)
    peer = randn(local, cuda.HIDDEN)
    cw, ow = torch.randn(cuda.HIDDEN, device=device) * 0.03, randn(cuda.HIDDEN)

    def view(buffer: torch.Tensor, offset: int, rows: int) -> torch.Tensor:
        return buffer[offset : offset + rows * cuda.ROW_BYTES].view(torch.bfloat16).view(rows, cuda.HIDDEN)

    total = (partial[:local].double() + peer.double() + prefix.double()).to(torch.bfloat16)
    bad = 0

    def check(what: str, got: torch.Tensor, head: torch.Tensor) -> None:
        nonlocal bad
        want = reference.attn_res(head, bank, ROWS, cw, ow, EPS).double()
        error = float((got.double() - want).norm() / want.norm())
        bad += not error < LIMIT
        print(f"{what}: {error:.1e}{'' if error < LIMIT else ' wrong'}", flush=True)

    for variant in (0, 1):
        out, _ = cuda.attn_res(prefix, bank, ROWS, cw, ow, EPS, variant=variant, grid=GRID)
        check(f"K0 {variant}", out, prefix)
    for path in ("pull", "push"):
        for half in range(2):
            view(theirs, ws.layout.partials + half * ws.layout.half, TOKENS)[:local] = peer
            view(mine, ws.slot(1) + half * ws.layout.half, local)[:] = peer
        source = partial
        if path == "pull":
            source = ws.partial(TOKENS)
            source.copy_(partial)
        out, new = ws.reduce_scatter_attn_res(
            source, prefix, bank, ROWS, cw, ow, EPS, path=path, write_row=6, grid=GRID
        )
        ws.check()
        check(path, out, total)
        bad += not torch.equal(new, bank[:, 6])
    out = ws.attn_res_all_gather(prefix, bank, ROWS, cw, ow, EPS, grid=GRID)[:local]
    ws.check()
    check("K3", out, prefix)
    print("wrong:", bad, flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
