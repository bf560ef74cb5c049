"""report.html: findings first, escaped text, and a viewer that a browser runs at 1400 and 400 px."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from audit.cases import of_rows, rows_of, small

from simlab.audit.folder import write_folder
from simlab.audit.page import MOST_RESPONSES

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
EVIL = "</script><img src=x onerror=document.title='hit'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """2,100 responses of six tokens with texts, ages, rewards; the last response is the worst."""
    folder = tmp_path_factory.mktemp("page")
    trainer, rollout = small(rows=2100)
    trainer[-1, 3] = rollout[-1, 3] - 5
    rows = rows_of(
        trainer, rollout, step=[i // 700 for i in range(2100)], reward=[i % 2 for i in range(2100)],
        response=list(range(2100)), advantages=[[1.0, -1.0] * 3] * 2100, token_texts=[[EVIL, *"abcde"]] * 2100,
        weight_versions=[[0] * 6] * 2100, trainer_version=[i // 700 for i in range(2100)],
    )  # fmt: skip
    audit = of_rows(folder, rows)
    write_folder(audit, folder / "out")
    return folder / "out" / "report.html"


def test_findings_first_and_nothing_from_outside(page):
    """One file: no address but its own figures, text of tokens escaped, NaN nowhere."""
    html = page.read_text()
    assert html.index('id="findings"') < html.index('id="gaps"') < html.index('id="viewer"')
    assert "http" not in re.sub(r"<svg.*?</svg>", "", html)
    assert EVIL not in html
    data = json.loads(html.split('id="data">')[1].split("</script>")[0], parse_constant=pytest.fail)
    assert len(data["responses"]) == MOST_RESPONSES
    worst = data["responses"][0]
    assert worst["place"] == "line 2100"
    assert np.argmax(np.abs(np.array(worst["pi"]) - worst["mu"])) == 3
    assert worst["text"][0] == EVIL
    cut = {name for i, name in enumerate(data["methods"]) if worst["cut"][3] >> i & 1}
    assert {"ppo", "kpop", "icepop"} <= cut


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.slow
def test_the_viewer_in_a_browser(page, tmp_path, width):
    """The worst token is focused and told, the text is text, and nothing is wider than the window."""
    test = page.read_text().replace(
        "if (location.hash === \"#worst\") next();",
        "next(); document.dispatchEvent(new KeyboardEvent('keydown', { key: 'k' })); document.dispatchEvent(new KeyboardEvent('keydown', { key: 'j' }));"
        "const step = document.getElementById('step'); step.value = '1'; step.dispatchEvent(new Event('input')); const some = document.getElementById('which').length;"
        "step.value = ''; step.dispatchEvent(new Event('input')); next();"
        "document.body.dataset.result = JSON.stringify({ some, all: document.getElementById('which').length, wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,"
        " detail: document.getElementById('detail').textContent, on: document.querySelector('#tokens .on').textContent });",
    )  # fmt: skip
    inner = tmp_path / "page.html"
    inner.write_text(test)
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="page.html" style="width:{width}px;height:900px"></iframe><pre></pre><script>onload = () => {{ const d = document.querySelector("iframe").contentDocument;'
        ' document.querySelector("pre").textContent = "RESULT" + d.body.dataset.result + "TITLE" + d.title + "END"; }</script>'
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    out = subprocess.run(
        [CHROMIUM, *flags, f"file://{outer}"], capture_output=True, text=True, timeout=120
    ).stdout
    told, title = re.search(r"RESULT(.*?)TITLE(.*?)END</pre>", out, re.DOTALL).groups()
    result = json.loads(told.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert "hit" not in title
    assert result["wide"] <= 0
    assert result["all"] == MOST_RESPONSES > result["some"] > 0
    assert result["on"] == "c"
    assert result["detail"].startswith("token 3: log pi")
    assert "Cut by" in result["detail"]
