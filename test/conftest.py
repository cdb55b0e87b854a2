"""Settings for the whole suite."""

import os

os.environ.setdefault("TORCH_BLOCKED_CHECK", "1")  # the zero tail is verified after every op

import torch_blocked  # noqa: E402


def pytest_report_header(config):
    env = torch_blocked.env()
    return (
        f"torch_blocked: {env['isa']} of {env['cpu_isa']} ({env['cpu']}), "
        f"{env['threads']} threads, torch {env['torch']}, oneDNN {env['onednn']}"
    )
