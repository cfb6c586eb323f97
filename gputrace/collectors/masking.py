"""Masking of secrets on command lines: passwords, keys and tokens, by the words around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

HIDDEN: Final = "***"


def _not_after(words: str, name: str) -> str:
    """Return the pattern of a name before which none of some words stands: ``pad-token``."""
    return name + "".join(rf"(?<!(?<![a-z]){word}[-_]{name})" for word in words.split())


_TOKEN: Final = _not_after(
    "pad bos eos sos eot eod unk cls sep mask masked image video audio vision think start end stop"
    " special prefix suffix per",
    "token",
)
_OF_MODELS: Final = (
    r"[-_](?:ids?|types?|dim|len|length|size|index|idx|count|limit|drop\w{0,9}|per|weights?|budget"
    r"|merg(?:e|ing)|prob\w{0,9}|ratio|rate|shift|mix\w{0,3}|prun\w{0,3}|pool\w{0,3}|embed\w{0,5}"
    r"|mask\w{0,3}|window|loss|level)(?![a-z])"
)
"""Language models have tokens that are no secrets: ``--pad-token``, ``--token-type``."""
_PASS: Final = _not_after(
    "n num one two single multi first second forward backward low high band", "pass"
)
_OF_PASSES: Final = r"[-_](?:through|rate|ratio|count|at|filter|threshold)(?![a-z])"
"""Other passes go over data or through a filter: ``--n-pass``, ``--pass-through``."""
_KEY: Final = _not_after("sort by group partition", "key")
_NAME: Final = (
    rf"(?:(?:pass(?:words?|wd|phrase|code)|(?<!by)(?<!com){_PASS}(?!{_OF_PASSES})"
    r"|pwd|secrets?(?:[-_]?key)?"
    rf"|(?:{_TOKEN}|signature)(?!{_OF_MODELS})|(?:api|access|account|private|shared).?keys?"
    r"|auth(?:orization)?|credentials?|bearer|cookie|webhook)(?![a-z])"
    r"(?![-_](?:file|path|dir|stdin|fd)\b)[\w-]{0,40}"
    r"|(?<=--)(?:tokens|(?:(?:new|so|user)-)?pin)(?![\w-])"
    rf"|(?<![a-z])(?:{_KEY}(?:[-_]?id)?|pat|pw|sig|sas|jwt|otp)(?![\w-]))"
)
"""Bounds keep the time linear in the length of a word."""
_MAY_NAME: Final = re.compile(
    r"(?i)pass|pwd|secret|token|signature|key|auth|credential|bearer|cookie|webhook"
    r"|(?:pin|pat|pw|sig|sas|jwt|otp)(?![\w-])"
)
"""Found wherever `_NAME` is: few commands have it, and the others need not wait for `_by_name`."""
_PIN: Final = r"(?<![a-z])pin(?:[-_]?(?:code|value))?"
"""Name of a number: ``I_MPI_PIN=1`` and ``--pin=on`` fix threads to cores."""
_SPACE: Final = re.compile(r"\s")
_VALUE: Final = r"""(?:"[^"]*"|'[^']*'|\\.|[^\s"'\\;&|])+"""

_PASSWORD_OPTIONS: Final = {
    program: option
    for option, programs in {
        "-p": "sshpass mysql mysqladmin mysqldump mysqlimport mysqlshow mariadb mariadb-admin"
        " mariadb-dump mongo mongosh mongodump mongorestore mongoexport mongoimport cqlsh rdesktop"
        " twine 7z 7za 7zz rar unrar",
        "-P": "sqlcmd bcp ipmitool zip unzip",
        "-a": "redis-cli valkey-cli",
        "-w": "ldapsearch ldapadd ldapmodify ldapdelete ldappasswd ldapwhoami",
        # what sshpass starts, whose -p is a port or a flag
        "": "ssh scp sftp rsync",
    }.items()
    for program in programs.split()
}
"""Elsewhere ``-p`` is a port, a plugin, or the parents of a folder."""
_LOGINS: Final = (
    "docker", "podman", "nerdctl", "buildah", "skopeo", "helm", "oras", "crane", "oc", "az",
)  # fmt: skip
"""Programs whose ``login`` takes a password with ``-p``."""
_WORDS: Final = re.compile(rf"({_VALUE}|[;&|\n]+)")

_READS_SECRET: Final = (
    r"--pass(?:word|phrase)-(?:stdin|fd)|--with-token|\bsudo\s+-S|\bchpasswd|\bpasswd\s+--stdin"
    r"|\bkinit"
)
_SAID: Final = r"""(?:"[^"]{0,200}"|'[^']{0,200}'|[^"'|;&\n]){1,200}+"""
_LOGINS_ALONE: Final = "".join(
    rf"(?<!{scheme}://)" for scheme in ("ssh", "sftp", "rsync", "hdfs", "abfs", "abfss", "wasbs")
)
"""Before the host in these addresses stands a user or a container, and no token."""
_WEBHOOKS: Final = (
    r"\bhooks\.slack\.com/(?:services|workflows|triggers)/",
    r"\bdiscord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/",
    r"\bdiscord://",
    r"\bapi\.telegram\.org/(?:file/)?bot",
    r"\btgram://",
    r"\.webhook\.office\.com/webhookb2/",
)
_TOKENS: Final = {
    "a JWT": r"eyJ[\w.-]{12}",
    "PEM in Base64": r"LS0tLS1CRUdJTi[\w+/=]{12,}",
    "age": r"AGE-SECRET-KEY-1[A-Z0-9]{20}",
    "Anthropic, OpenAI, OpenRouter, Langfuse": (
        r"sk-(?:(?:admin|ant|lf|or|proj|svcacct)-[\w-]{12}|[A-Za-z0-9]{16})"
    ),
    "Atlassian": r"ATATT(?=[A-Za-z]{0,24}\d)[\w+/=-]{24,}",  # a digit, for DNA has none
    "AWS": r"A(?:KIA|SIA)[A-Z0-9]{16}",
    "Databricks": r"dapi[0-9a-f]{32}",
    "DigitalOcean": r"do[opr]_v1_[A-Za-z0-9]{20}",
    "Discord": r"[MNO][DTjz][\w-]{21,26}\.[\w-]{6}\.[\w-]{27}",
    "Docker": r"dckr_[op]at_[\w-]{12}",
    "Figma": r"figd_[\w-]{20}",
    "Fireworks": r"fw_[A-Za-z0-9]{20}",
    "GitHub": r"gh[oprsu]_[A-Za-z0-9]{16}|github_pat_\w{16}",
    "GitLab": r"gl(?:agent|cbt|dt|ffct|ft|imt|oas|pat|ptt|rt|soat)-[\w-]{16}",
    "Google": r"AIza[\w-]{16}|ya29\.[\w-]{12}|GOCSPX-[\w-]{20}",
    "Grafana": r"glsa_[A-Za-z0-9]{20}|glc_[A-Za-z0-9+/]{32,}",
    "Groq": r"gsk_[A-Za-z0-9]{20}",
    "HashiCorp Vault": r"hv[bs]\.[\w-]{24}",
    "Hugging Face": r"hf_[A-Za-z0-9]{16}|api_org_[A-Za-z]{20}",
    "LangSmith": r"lsv2_(?:pt|sk)_\w{20}",
    "Linear": r"lin_api_[A-Za-z0-9]{20}",
    "Notion": r"ntn_[A-Za-z0-9]{20}",
    "npm": r"npm_[A-Za-z0-9]{16}",
    "NVIDIA": r"nvapi-[\w-]{12}",
    "Perplexity": r"pplx-[A-Za-z0-9]{20}",
    "Pinecone": r"pcsk_\w{20}",
    "Postman": r"PMAK-[A-Fa-f0-9]{24}",
    "Pulumi": r"pul-[a-f0-9]{40}",
    "PyPI": r"pypi-\w{16}",
    "Replicate": r"r8_[A-Za-z0-9]{20}",
    "RubyGems": r"rubygems_[a-f0-9]{40}",
    "RunPod": r"rpa_[A-Za-z0-9]{20}",
    "SendGrid": r"SG\.[\w-]{16}",
    "Sentry": r"sntry[su]_[A-Za-z0-9]{20}",
    "Shopify": r"shp(?:at|ca|pa|ss)_[A-Za-z0-9]{20}",
    "Slack": r"xox[abeoprs]-[\w-]{12}|xapp-\d-[\w-]{12}",
    "Square": r"sq0[a-z]{3}-[\w-]{12}",
    "Stripe": r"[rs]k_(?:live|prod|test)_[A-Za-z0-9]{10}",
    "Supabase": r"sbp_(?:v0_)?[A-Za-z0-9]{20}|sb_secret_[\w-]{16}",
    "Tailscale": r"tskey-(?=[\w-]{0,80}\d)[\w-]{16}",
    "Telegram": r"\d{8,10}:AA[\w-]{30}",
    "Together": r"tgp_v1_[\w-]{20}",
    "Weights & Biases": r"wandb_v1_\w{20}",
    "xAI": r"xai-(?:[A-Za-z0-9]{20}|\w{60})",
}
"""Beginnings of tokens that can be told without a name before them, by issuer.

Prefixes and alphabets are those of three public lists: the rules of gitleaks (July 2026), the
detectors of TruffleHog 3.97 (August 2026) and the rules of Kingfisher 1.10 (June 2025). Lengths are
the known ones or less, since issuers change them; an alphabet without hyphens or underscores spares
words such as ``sk-learn-pipeline`` and ``hf_finetune_llama.py``.
"""
_PRIVATE_KEY: Final = re.compile(
    r"(?s)(?P<shown>)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r".*?(?:-----END [A-Z0-9 ]{0,60}-----|\Z)"
)
"""To its end."""
_WITHIN: Final = (
    re.compile(rf"(?i)(?P<shown>\bbearer\s+){_VALUE}"),
    re.compile(rf"""(?i)(?P<shown>{_PIN}\\?["']?\s*[=:]\s*["']?)\d{{4,12}}(?![\w.,-])"""),
    # of curl: -u user:password, but not docker's -u 1000:1000
    re.compile(
        rf"(?P<shown>(?<!\S)(?:-u\s*|--(?:proxy-)?user[\s=]+)(?!\d+:\d+(?!\S))[^\s:/]{{1,80}}:)"
        rf"{_VALUE}"
    ),
    # what a program reads: echo PASSWORD | docker login --password-stdin, or after <<<
    re.compile(
        rf"(?P<shown>\b(?:echo|printf)\s){_SAID}(?=\|[^|;&\n]{{0,200}}?(?:{_READS_SECRET}))"
    ),
    re.compile(rf"(?P<shown>(?:{_READS_SECRET})[^|;&<\n]{{0,200}}+<<<\s*){_VALUE}"),
    # with a password that is not encoded, which no port begins: it ends at the last @ before a path
    # or a port, else at the first @ before a host with a dot (a version follows), else at the last
    re.compile(
        r"""(?P<shown>[A-Za-z][\w+.-]{0,20}://)[^/\s?#:\["']{0,80}+:(?!\d{1,5}[/?#])"""
        r"""(?:[^\s"']{1,400}(?=@[^\s"'@/:]{1,80}[/:][^\s"'@]{0,400}(?![^\s"']))"""
        r"""|[^\s"'@]{1,400}(?=@[\w-]{1,80}\.[\w.-]{1,80}(?![\w@.-]))|[^\s"']{1,400}(?=@))"""
    ),
    # of an address: scheme://user:password@host, scheme://token@host
    re.compile(
        rf"(?P<shown>[A-Za-z][\w+.-]{{0,20}}://)(?:[^/\s?#@:]*:|{_LOGINS_ALONE})[^/\s?#]+(?=@)"
    ),
    re.compile(rf"(?P<shown>{'|'.join(_WEBHOOKS)})[\w/:@%+.-]+"),
    re.compile(rf"(?P<shown>\b)(?:{'|'.join(_TOKENS.values())})[\w.-]*"),
)


@cache
def _by_name() -> tuple[re.Pattern[str], ...]:
    """Return the pattern of what ends in the name of a secret, and those of named values.

    Compiled when first needed, as that takes 0.03 s.
    """
    return (
        re.compile(rf"(?i){_NAME}$"),
        # of a shell or JSON: NAME=VALUE, "name": "value", --name value, Authorization: Bearer
        re.compile(
            rf"""(?i)(?P<shown>{_NAME}\\?["']?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?){_VALUE}"""
        ),
        re.compile(rf"(?i)(?P<shown>(?<!\S)-[\w.-]{{0,40}}?{_NAME}\s+){_VALUE}"),
    )


def _ends_in_a_name(text: str) -> bool:
    return bool(_MAY_NAME.search(text) and _by_name()[0].search(text))


def masked(command: Sequence[str]) -> list[str]:
    """Return the words of a command line with secret-looking values replaced."""
    words = _without_passwords(command)
    return [
        HIDDEN
        if before.startswith("-") and _ends_in_a_name(before)
        else _masked_word(f"{before} {word}").partition(" ")[2]
        if before in ("-u", "--user", "--proxy-user")
        else _masked_word(word)
        for before, word in zip(["", *words], words, strict=False)
    ]


def _without_passwords(words: Sequence[str]) -> list[str]:
    """Replace what follows the short options that stand for a password in some programs only."""
    shown: list[str] = []
    before = option = ""
    logs_in = False
    for word in words:
        name = word.rpartition("/")[2]
        if option and before == option and not word.startswith("-"):
            shown.append(HIDDEN)
            option = ""
        elif option and word.startswith(option) and word != option:
            shown.append(option + HIDDEN)
            option = ""
        else:
            shown.append(word)
            if word.strip(";&|\n") == "":
                option, logs_in = "", False
            elif before == "--" or not before.startswith("--"):
                # the value of an option is no program: --name mysql
                option = _PASSWORD_OPTIONS.get(name, option)
                logs_in |= name in _LOGINS
                if name == "login" and logs_in:
                    option = "-p"
        before = word
    return shown


def _masked_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and not _SPACE.search(name) and _ends_in_a_name(name):
        return f"{name}={HIDDEN}"
    if _SPACE.search(word):
        pieces = _WORDS.split(word)
        pieces[1::2] = _without_passwords(pieces[1::2])
        word = "".join(pieces)
    named = _by_name()[1:] if _MAY_NAME.search(word) else ()
    for pattern in (_PRIVATE_KEY, *named, *_WITHIN):
        word = pattern.sub(rf"\g<shown>{HIDDEN}", word)
    return word
