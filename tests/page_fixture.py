"""Published toy models with checkpoints and an ablation, and a process that serves their comparison page."""

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hub_fixture import RunningHub
from toy_models import Toys
from transformers import AutoModelForCausalLM
from warm import PYTHON

from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.models import load_classifier

PROMPTS = ["the battery is", "the camera", "<b>bold</b> screen"]
PPO, LOOSE, VOTES = "local/toy-ppo", "local/toy-loose-ppo", "local/toy-votes"
#: Step -> (share of PPO's change, logged reward, logged KL). The steps are not evenly spaced.
STEPS = {10: (0.2, -0.1, 0.05), 20: (0.6, 0.3, 0.2), 40: (1.0, 0.4, 0.31)}
LOOSE_STEPS = {10: (1.5, 0.5, 0.9), 40: (4.0, 0.9, 6.5)}
RECOMMENDED = 20
#: A PNG of one pixel.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)
SECONDS = 180
#: A table as wide as a card's table of figures.
FIGURES = (
    "| held-out prompts | SFT | PPO | constant |\n|---|---|---|---|\n"
    "| **Win rate over SFT** (judge: gold utility) | 0.49 ¹ | **0.73** (0.69–0.76) | 0.18 |\n"
    "| **Reward** (what PPO maximizes) | −0.07 | **1.17** (1.11–1.22) | 1.96 ² |"
)


def publish(hub: RunningHub, toys: Toys) -> None:
    """Publishes SFT, reward model, and two PPO runs from them with a tag and a card for each step."""
    api = hub.api()
    critic_from(load_classifier(toys.reward)).save_pretrained(toys.ppo / "critic")
    commits = {}
    for role in ("sft", "reward"):
        api.create_repo(f"local/toy-{role}")
        commits[role] = api.upload_folder(repo_id=f"local/toy-{role}", folder_path=getattr(toys, role)).oid
    # PPO did not start from main: the cards name an earlier commit.
    api.upload_file(repo_id="local/toy-sft", path_in_repo="config.json", path_or_fileobj=b"{}")
    for repo, beta, steps in ((PPO, 0.05, STEPS), (LOOSE, 0.0, LOOSE_STEPS)):
        api.create_repo(repo)
        listed = [
            {"tag": f"step-{step:06d}", "step": step, "reward": reward, "kl": kl}
            for step, (_, reward, kl) in steps.items()
        ]
        for step, (share, _, kl) in steps.items():
            folder = toys.ppo.with_name(f"{repo.rpartition('/')[2]}-{step}")
            checkpoint_between(toys, folder, share)
            card = {
                "schema": 1,
                "stage": "ppo",
                "recipe": "toy",
                "simulated": True,
                "step": step,
                "parents": {name: {"repo": f"local/toy-{name}", "commit": commits[name]} for name in commits},
                "evaluation": evaluation(steps, kl),
                "prompts": PROMPTS,
                "settings": {"temperature": 0.9, "response_length": 12, "kl_coef": beta},
                "chosen": {"step": max(steps)},
                "checkpoints": listed,
            }
            (folder / "rlhf_card.json").write_text(json.dumps(card))
            (folder / "plots").mkdir(exist_ok=True)
            (folder / "plots" / "reward_kl.png").write_bytes(PIXEL)
            (folder / "README.md").write_text(
                f"---\ntags:\n- rlhf-zoo\n- stage:ppo\n---\n# {repo} at step {step}\n\n| figure | value |\n|---|---|\n"
                f"| KL | {kl} |\n\n{FIGURES}\n\n![Reward and KL against the step](plots/reward_kl.png)\n\n"
                "![far away](https://example.com/x.png)\n\n<script>window.ran=1</script>\n"
            )
            commit = api.upload_folder(repo_id=repo, folder_path=folder).oid
            api.create_tag(repo, tag=f"step-{step:06d}", revision=commit)


def evaluation(steps: Mapping[int, tuple[float, float, float]], kl: float) -> dict[str, Any]:
    """Returns an evaluation in which the judge's score is reward - reward²: it falls when the reward is high."""

    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "ci95": [value - 0.05, value + 0.05]}

    judged = {step: reward - reward**2 for step, (_, reward, _) in steps.items()}
    return {
        "ppo": {"kl": {"value": kl, "ci95": [0.2, 0.4], "n": 540}},
        "judge": {"name": "rule:remarks(name='gold utility')"},
        "win_rate": {"value": 0.5 + judged[max(steps)], "ci95": [0.69, 0.76], "n": 540},
        "recommended": RECOMMENDED,
        "over_training": {
            "verdict": "healthy",
            "step": max(steps),
            "checkpoints": [
                {"step": step, "reward": figure(reward), "judge": figure(judged[step]), "kl": figure(kl_at_step)}
                for step, (_, reward, kl_at_step) in steps.items()
            ],
        },
    }


def checkpoint_between(toys: Toys, folder: Path, share: float) -> None:
    """Copies PPO's folder with a policy interpolated between SFT's (share 0) and PPO's (share 1)."""
    shutil.copytree(toys.ppo, folder, dirs_exist_ok=True)
    sft, ppo = (AutoModelForCausalLM.from_pretrained(path) for path in (toys.sft, toys.ppo))
    with torch.no_grad():
        for parameter, start in zip(ppo.parameters(), sft.parameters(), strict=True):
            parameter.copy_(start + share * (parameter - start))
    ppo.save_pretrained(folder)


class Outside:
    """A proxy to the outside that answers nothing and records the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                connection.settimeout(1)
                try:
                    line = connection.recv(200).decode(errors="replace").split("\r\n")[0]
                except OSError as error:
                    line = f"a connection that sent nothing ({error})"
                self.requests.append(line)

    def environment(self) -> dict[str, str]:
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = dict.fromkeys([*names, *map(str.lower, names)], self.url)
        return proxies | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

    def close(self) -> None:
        self._server.close()


@dataclass
class Served:
    """A page's URL and the process that serves it."""

    url: str
    process: subprocess.Popen


@contextmanager
def serve(hub: RunningHub, log: Path, *arguments: str) -> Iterator[Served]:
    """Runs `rlhf-zoo compare` with these arguments, and interrupts it at the end of the context.

    Checks at the end that the interrupt ended it with code 130, that it printed no traceback, and that it sent no
    request to another host.
    """
    outside = Outside()
    env = {name: value for name, value in hub.env.items() if not name.startswith("GRADIO_")} | outside.environment()
    command = [*PYTHON, "-m", "rlhf_zoo.cli", "compare", *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + SECONDS
        while "Comparison page: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Served(log.read_text().split("Comparison page: ")[1].split()[0], process)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(30)
        outside.close()
    assert "Traceback" not in log.read_text(), log.read_text()
    assert not outside.requests, outside.requests


def format_figure(value: float, *, sign: bool = True) -> str:
    """Formats a number as the page does."""
    return f"{value:{'+' if sign else ''}.2f}".replace("-", "−")


def shown(side: Any) -> dict[str, str]:
    """Returns what the page must show for a side."""
    return {
        "completion": side.completion + ("∎" if side.ended else ""),
        "reward": format_figure(side.reward),
        "log_ratio": format_figure(side.log_ratio),
        "kl": format_figure(side.kl, sign=False),
        "length": str(side.length),
        "stopped": "by itself" if side.ended else "cut off",
    }
