"""A K3-shaped prefill server in torch that speaks SGLang's endpoints: ``python -m nsysk3.workload --tp-size 2 ...``.

For machines without SGLang or weights: the same launcher, load, window and analysis drive it.  Real tensor, pipeline
and expert parallelism over NCCL on GPUs and gloo on CPUs; weights are random and the same in every layout, so layouts
must agree on every token.  Standard library and torch only; the launcher process does without torch.

Who does what:

* ``launcher``: the process of a node; starts one process a rank, watches them, stops them.  On the first node it also
  runs ``server`` (HTTP), ``scheduler`` (what goes into each micro-batch) and ``hub`` (the ranks' connections).
* ``rank``: a rank's process; ``engine`` runs micro-batches through its stage of ``model``, ``boundary`` hands them on.
* ``paths``: the three forms of the collectives around the attention residual (``--sp off|nccl|nsysk3``).
* ``marks``: NVTX markers and the capture, as nsysk3's SGLang plugin has them.
"""
