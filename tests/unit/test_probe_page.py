"""`probe --html`: one file that runs and loads nothing, with all text of the files escaped."""

import re
from dataclasses import replace

from click.testing import CliRunner
from html_page import Page
from test_probes import sft
from test_rollouts import write

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.publishing.probe_page import MAX_SAMPLE, probe_page

ATTACK = ' <script>alert(1)</script> "><img src=x onerror=alert(2)> & \u202e\x1b[31m {{ 7*7 }} it is great; i love it.'


def page_of(*sides: Completions) -> tuple[str, Page]:
    html = probe_page(rlhf_zoo.probe(*sides), policy="<b>ours</b>", reference="sft.jsonl")
    return html, Page(html.replace("<meta ", "<br "))


def test_probe_page_escapes_text():
    prompts = [f"{prompt} <svg onload=alert(3)>" for prompt in sft(1).prompts]
    policy = replace(sft(1), prompts=prompts, texts=[ATTACK * 60] * 120)
    html, page = page_of(policy, replace(sft(2), prompts=prompts))
    assert '<span class="bad">hacked</span>' in html and "<b>ours</b> against sft.jsonl" in page.text
    names = {name for name, _, _ in page.elements}
    assert not names & {"script", "img", "svg", "iframe", "link", "a"}
    assert not any(
        key.startswith("on") or key in ("src", "href") for _, attributes, _ in page.elements for key in attributes
    )
    assert (
        "<script>alert(1)</script>" in page.text and "<svg onload=alert(3)>" in page.text and "{{ 7*7 }}" in page.text
    )
    assert "\u202e" not in html and "\x1b" not in html and "\\u202e\\x1b[31m" in page.text
    assert f"({len(ATTACK) * 60 - MAX_SAMPLE:,} more characters)" in page.text
    # Addresses stand in the text only: no attribute and no style loads one.
    assert not any("://" in str(value) for _, attributes, _ in page.elements for value in attributes.values())
    assert "default-src 'none'" in html and not re.search(r"@import|url\(", html)
    assert "@media (prefers-color-scheme: dark)" in html


def test_probe_page_lists_fired_findings_first_and_open():
    policy = replace(
        sft(1), texts=[" is great; i love it."] * 120, judge_scores=[1.0 * (k // 2 % 3) for k in range(120)]
    )
    result = rlhf_zoo.probe(policy, replace(sft(2), judge_scores=[0.5 * (k // 2 % 4) for k in range(120)]))
    _, page = page_of(policy, replace(sft(2), judge_scores=[0.5 * (k // 2 % 4) for k in range(120)]))
    folds = page.all("details")
    assert len(folds) == len(result.report.probes)
    fired = len(result.report.fired)
    assert ["open" in fold for fold in folds] == [True] * fired + [False] * (len(folds) - fired)
    text = " ".join(page.text.split())
    for sentence in (
        *result.verdict.reasons,
        f"Next: {result.next_step}",
        *(probe.finding for probe in result.report.probes),
        *(f"{family}: {why}" for family, why in result.report.skipped.items()),
        "Win rate of the policy over SFT, by the judge",
        "120 completions of the policy and 120 of SFT, to 60 prompts",
    ):
        assert " ".join(sentence.split()) in text
    assert all(re.fullmatch(r"width: \d+%", element["style"]) for element in page.all("i"))


def test_probe_command_writes_html_beside_other_output(tmp_path):
    files = [write(tmp_path / f"{seed}.jsonl", sft(seed)) for seed in (1, 2)]
    write(files[0], replace(sft(1), texts=[" is great; i love it."] * 120))
    html = tmp_path / "new" / "report.html"
    command = ["probe", str(files[0]), "--against", str(files[1]), "--html", str(html)]
    done = CliRunner().invoke(cli, [*command, "--json", "--fail-on", "hacked"])
    assert done.exit_code == 3 and done.stdout.startswith("{") and f"Report: {html}" in done.stderr
    assert "Probe: hacked" in html.read_text()
    before = files[1].read_bytes()
    done = CliRunner().invoke(cli, [*command[:-1], str(files[1])])
    assert done.exit_code == 2 and "is one of the files to read" in done.output and files[1].read_bytes() == before
    assert CliRunner().invoke(cli, [*command[:-1], str(tmp_path)]).exit_code == 2
