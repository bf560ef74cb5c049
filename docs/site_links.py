"""For mkdocs: links out of docs/ become the path in the repository, which a site without it can still say."""

import re

OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown, **_):
    """`[text](../path)` to `text (path)`; where the text is the path, the path alone."""

    def said(match):
        text, path = match[1], match[2]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return OUT.sub(said, markdown)
