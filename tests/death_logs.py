"""What servers print when they die, by the kind of death: as SGLang, PyTorch, NCCL and uvicorn word it."""

DEATHS = {
    "oom": """[2026-08-21 12:03:09 PP0 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2906, in run_scheduler_process
  File "/sgl-workspace/sglang/python/sglang/srt/layers/quantization/mxfp4.py", line 411, in create_weights
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.31 GiB. GPU 1 has a total capacity of 83.64 GiB of \
which 612.19 MiB is free. Including non-PyTorch memory, this process has 83.03 GiB memory in use.""",
    "kv-oom": """[2026-08-21 12:07:12 TP0] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.""",
    "watchdog": """[2026-08-21 16:11:01 PP3 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
[2026-08-21 16:11:06] Received sigquit from a child process. It usually means the child failed.""",
    "decode-graph": """Capturing batches (bs=16 avail_mem=4.87 GB):   0%|          | 0/5 [00:00<?, ?it/s]
[2026-08-21 15:59:48 PP9 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 322, in \
register_graph_buffers
RuntimeError: Failed: Cuda error /sgl-kernel/csrc/allreduce/custom_all_reduce.cuh:459 'invalid argument'
Exception: Capture cuda graph failed: Failed: Cuda error 'invalid argument'
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)""",
    "port": "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use",
    "dist-port": """[W821 12:02:41.101 socket.cpp:200] The server socket has failed to bind to [::]:20000 (errno: 98 - \
Address already in use).
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 20000, \
useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use""",
    "nccl": """node1:4211:4711 [1] NCCL INFO Bootstrap: Using bond0:192.0.2.11<0>
[rank9]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL \
version 2.28.9
[rank9]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank9]: Last error:
[rank9]: socketPollConnect: connect to 192.0.2.12<45091> returned Connection refused, exceeded error retry count""",
    "ib": """node1:4211:4810 [1] transport/net_ib/p2p.cc:812 NCCL WARN NET/IB: Got completion from peer \
192.0.2.12<41235> with status=12 opcode=32764 len=0 vendor err 129 (Recv) localGid ::ffff:192.0.2.11 \
remoteGids::ffff:192.0.2.12 hca mlx5_2
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a \
network error, NCCL version 2.28.9""",
    "gloo": """RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] \
no error""",
    "tp-ep": "AssertionError: tp_size (2) must be divisible by ep_size (4)",
    "pp-layers": "ValueError: Number of layers must be at least the pipeline-parallel size: 8 < 16",
    "backend": """ValueError: Cannot use 'flashinfer_mxfp4' with the current model: not in \
['auto', 'triton', 'cutlass']""",
    "flag": """usage: launch_server.py [-h] --model-path MODEL_PATH
launch_server.py: error: unrecognized arguments: --disable-decode-cuda-graph""",
    "module": "/usr/bin/python3: Error while finding module specification for 'sglang.launch_server' \
(ModuleNotFoundError: No module named 'sglang')",
    "model": "OSError: Incorrect path_or_model_id: '/data/hf_models/Kimi-K3'. Please provide either the path to a \
local folder or the repo_id of a model on the Hub.",
    "driver": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "shm": "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's \
workers are out of shared memory. Please try to raise your shared memory limit.",
    "no-cuda": "RuntimeError: No CUDA GPUs are available",
    "unknown": """Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/launch_server.py", line 55, in <module>
ZeroDivisionError: the moon is in the wrong phase""",
}
