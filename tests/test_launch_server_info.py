"""What a server says of itself, against what was planned."""

from __future__ import annotations

import pytest
from loopback import loopback

from nsysk3.errors import RunFailedError
from nsysk3.launch.server_info import admission, fetch_info, mismatches, redacted, unreported


def test_what_is_not_as_planned_is_named_under_any_versions_names() -> None:
    expected = {"pp_size": 8, "tp_size": 4, "moe_runner_backend": "flashinfer_mxfp4", "disable_radix_cache": True}
    new = {"pp_size": 8, "tp_size": 4, "moe_runner_backend": "flashinfer_mxfp4", "disable_radix_cache": True}
    assert mismatches(new, expected) == []
    old = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4, "moe_runner_backend": "triton"}
    assert mismatches(old, expected) == [
        "pp_size is 2, the plan asked for 8",
        "moe_runner_backend is 'triton', the plan asked for 'flashinfer_mxfp4'",
    ]
    assert unreported(old, expected) == ["disable_radix_cache"]
    assert mismatches({"disable_radix_cache": False}, {"disable_radix_cache": True})


@pytest.mark.parametrize(
    ("micro", "depth", "running", "concurrency", "admits", "words"),
    [
        (1, 0, 64, 16, 8, "of C=16 8 always wait"),
        (2, 0, 16, 16, 16, "all C=16 requests run at once"),
        (8, 0, 64, 4, 64, "fewer than the pipeline holds"),
        (4, 2, 12, 16, 12, "of C=16 4 always wait"),
    ],
)
def test_the_resolved_micro_batch_is_explained(
    micro: int, depth: int, running: int, concurrency: int, admits: int, words: str
) -> None:
    state = {"pp_max_micro_batch_size": micro, "effective_max_running_requests_per_dp": running}
    info = {"pp_size": 8, "pp_max_micro_batch_size": None, "pp_async_batch_depth": depth, "internal_states": [state]}
    found = admission(info)
    assert found
    assert found.admits == admits
    assert words in found.meaning(concurrency)
    assert admission({"pp_size": 1, "pp_max_micro_batch_size": 4}) is None


def test_secrets_of_a_server_are_hidden() -> None:
    info = {"api_key": "hunter2", "launch_command": "serve --admin-api-key hunter2", "internal_states": [{"x": 1}]}
    assert "hunter2" not in str(redacted(info))
    assert redacted(info)["internal_states"] == [{"x": 1}]


def test_information_is_found_under_its_old_name_or_missed_in_words() -> None:
    with loopback("--pp-size", "4", "--fault", "old-info") as server:
        info, endpoint = fetch_info(server.url)
    assert (info["pp_size"], endpoint) == (4, "/get_server_info")
    with loopback("--fault", "no-info") as server, pytest.raises(RunFailedError, match="HTTP 404"):
        fetch_info(server.url)
