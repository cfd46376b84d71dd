"""The report is one file that needs no other, and says what was found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_tpi import versions
from mindspeed_tpi.errors import InputError
from mindspeed_tpi.page import require_matplotlib, text_table
from mindspeed_tpi.parity import driver, report
from mindspeed_tpi.parity.request import Request
from mindspeed_tpi.parity.result import Result
from tests.unit.engines import Engines, write_tiny


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    model = write_tiny(tmp_path_factory.mktemp("model") / "a <b> & c")
    request = Request(model=str(model), prompts=((1, 2), (3,)), max_new_tokens=8, train="tp=1", rollout="tp=1")
    return driver.run(request, stock=request, launch=Engines())


def test_the_page_is_self_contained(result: Result) -> None:
    page = report.page(result, "mindspeed-tpi parity --model 'a <b> & c'")
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:") for source in sources)


def test_the_page_says_what_was_found(result: Result) -> None:
    page = report.page(result, "mindspeed-tpi parity --model 'a <b> & c'")
    assert "logdiff is exactly 0 on all 16 tokens" in page
    assert "a &lt;b&gt; &amp; c" in page and "<b>" not in page
    contract = result.parity.contract
    assert contract is not None and contract["fingerprint"] in page
    for text in ("kv_block", "0.16.1", "0.32.0", "preemptions", "tp=1", "2.50e-01", "mindspeed-tpi parity"):
        assert text in page


def test_an_inexact_run_says_so(result: Result) -> None:
    assert result.stock is not None
    other = Result(result.stock)
    assert 'class="inexact"' in report.page(other, "") and "16 of 16 tokens differ" in report.verdict(other)


def test_the_picture_is_a_png(result: Result, tmp_path: Path) -> None:
    assert report.picture(result).startswith(b"\x89PNG")
    assert report.picture(Result(result.parity)).startswith(b"\x89PNG")


def test_tables_align(result: Result) -> None:
    lines = text_table(report.rows(result)).splitlines()
    assert lines[0].split() == ["stock", "parity"]
    assert "tokens that differ" in lines[2] and lines[2].split()[-2:] == ["16", "0"]
    assert len({len(line) for line in lines}) == 1


def test_without_matplotlib_a_report_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'mindspeed-tpi\[report\]'"):
        require_matplotlib()
