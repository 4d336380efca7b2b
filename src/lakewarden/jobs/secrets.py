"""What may be told to others: texts without tokens, passwords and keys.

As far as they can be told by their looks; what was given to reach a warehouse is taken out by its
values, where they are known (`Access.hide`).  Texts may be long, and anybody's, so every pattern looks
at each character a bounded number of times.
"""

from __future__ import annotations

import re

from lakewarden.jobs.tokens import PREFIX

_TOKEN = re.compile(rf"{PREFIX}[0-9A-Za-z]+")
#: What stands before the last @ of an address's first part.
_USER = re.compile(r"(?<=://)[^/\s]*@")
#: What follows a word that announces a secret: all within quotes, or up to where a value ends.
_NAMED = re.compile(
    r"""(?ix)
    (?P<head>
        (?: pass(?:word|wd|phrase) | (?<![a-z])pwd | secret | token | credential | signature
          | (?<![a-z])sig(?![a-z]) | api[-_.]?key | (?:access|account|private)[-_.]?key | authorization )
        [\w.-]{0,40} \\?["']? \s{0,8} (?: [:=] | %3[ad] ) \s{0,8}
        (?: (?:bearer|basic) \s{1,8} )?
    )
    (?: (?P<double> \\?" ) (?: [^"\\] | \\. )*
      | (?P<single> \\?' ) (?: [^'\\] | \\. )*
      | [^\s"',;&}]+ )
    """
)


def without_secrets(text: str) -> str:
    """Return text without tokens, passwords and keys, as far as they can be told by their looks."""
    text = _TOKEN.sub(f"{PREFIX}…", text)
    text = _USER.sub("…@", text)
    return _NAMED.sub(
        lambda found: f"{found['head']}{found['double'] or found['single'] or ''}…", text
    )
