"""Secrets on command lines are masked, and what only resembles them is kept."""

from __future__ import annotations

import time
from typing import Final

import pytest

from gputrace.collectors.masking import masked


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["x", "--password", "p", "y"], ["x", "--password", "***", "y"]),
        (["x", "--hf-token=t"], ["x", "--hf-token=***"]),
        (["env", "API_KEY=k", "x"], ["env", "API_KEY=***", "x"]),
        (["x", "--tokenizer", "bert"], ["x", "--tokenizer", "bert"]),
        (["x", "--pad-token", "<pad>"], ["x", "--pad-token", "<pad>"]),
        (["x", "--eos_token_id=2"], ["x", "--eos_token_id=2"]),
        (["x", "--token-dim", "64"], ["x", "--token-dim", "64"]),
        (["x", "--password-file", "/p"], ["x", "--password-file", "/p"]),
        (
            ["x", "--jwt", "t", "--pad", "--my-token", "t"],
            ["x", "--jwt", "***", "--pad", "--my-token", "***"],
        ),
        (["x", "--max-tokens", "5", "--author=me"], ["x", "--max-tokens", "5", "--author=me"]),
        (["x", "--key-dim", "64"], ["x", "--key-dim", "64"]),
        (["x", "--wandb-key", "k"], ["x", "--wandb-key", "***"]),
        (["x", "--use-token", "--token", "t"], ["x", "--use-token", "***", "***"]),
        (["x", "https://u:p@host/a"], ["x", "https://***@host/a"]),
        (["x", "--db=pg://u:p@host/a?b=c"], ["x", "--db=pg://***@host/a?b=c"]),
        (
            ["git+https://u:p@git.example.org/a/b.git@v1.0"],
            ["git+https://***@git.example.org/a/b.git@v1.0"],
        ),
        (["env", "PIN=4711", "SIM_PIN=123456"], ["env", "PIN=***", "SIM_PIN=***"]),
        (["sh", "-c", "PIN='4711' x"], ["sh", "-c", "PIN='***' x"]),
        (["x", "http://h/a?b=1&sig=s&c=2"], ["x", "http://h/a?b=1&sig=***&c=2"]),
        (["-H", "Authorization: Bearer t"], ["-H", "Authorization: Bearer ***"]),
        (["sh", "-c", "x --token t --lr=1"], ["sh", "-c", "x --token *** --lr=1"]),
        (["sh", "-c", "cd d && A_KEY='k k' x"], ["sh", "-c", "cd d && A_KEY=*** x"]),
        (['{"token": "t", "lr": 3}'], ['{"token": *** "lr": 3}']),
        (["x", "hf_abcdefghijklmnopqrst"], ["x", "***"]),
        *(
            (["x", prefix + "abcdefghijklmnop"], ["x", "***"])
            for prefix in (
                "nvapi-",
                "AIza",
                "sk_live_",
                "npm_",
                "pypi-",
                "ya29.",
                "dckr_pat_",
                "SG.",
                "sq0csp-",
            )
        ),
        (
            ["x", "--secretKey", "s", "--secrets", "t"],
            ["x", "--secretKey", "***", "--secrets", "***"],
        ),
        (["x", "--tokens", "t", "--api-keys=k"], ["x", "--tokens", "***", "--api-keys=***"]),
        (["x", "--passwords=p", "--pw=q"], ["x", "--passwords=***", "--pw=***"]),
        (["x", "--login.pw", "q"], ["x", "--login.pw", "***"]),
        (["curl", "-u", "me:p", "h"], ["curl", "-u", "me:***", "h"]),
        (["curl", "-ume:p", "h"], ["curl", "-ume:***", "h"]),
        (["x", "AccountKey=k;EndpointSuffix=e"], ["x", "AccountKey=***"]),
        (["sh", "-c", "curl -u me:p h"], ["sh", "-c", "curl -u me:*** h"]),
        (["docker", "run", "-u", "1000:1000"], ["docker", "run", "-u", "1000:1000"]),
        (["python", "-u", "train.py"], ["python", "-u", "train.py"]),
        (
            ["x", "https://hooks.slack.com/services/T0/B0/abc"],
            ["x", "https://hooks.slack.com/services/***"],
        ),
    ],
)
def test_values_that_look_secret_are_masked(words: list[str], shown: list[str]) -> None:
    assert masked(words) == shown


SECRETS: Final = """
password passwd pass passphrase pwd pw passcode db-password smtp_pass secret secrets
client-secret client_secret clientSecret secret-access-key secretKey access-key accessKey
access_key_id private-key encryption-key signing-key license-key api-key apikey apiKey api-keys
openai_api_key wandb-key token tokens hf_token hub-token auth-token authToken access-token
accessToken refresh_token id-token session-token bearer bearer-token auth basic-auth redis-auth
credentials credential cookie webhook webhook-url sas-token signature sig jwt pat otp key
ssh-key logger.wandb.api_key hydra.password
"""
NO_SECRETS: Final = """
lr tokenizer tokenizer-name max-tokens max_new_tokens num-tokens tokens-per-batch token-type
tokens_per_sample token-ids pad-token bos_token eos-token mask-token image_token cls-token
token-dropout token_weight special-tokens add-special-tokens key-dim key_size num-key-heads
query-key-norm monkey keyboard sort-key group_by_key partition-key primary-keys author authority
passes num-passes bypass compass secretary password-file token-file credentials-file key-file
signature-len signature_dim api-version patience pattern path pat-size signal sigma design
assign spotlight sasquatch cookies-len bearing user users device output
"""


def test_sixty_names_of_secrets_hide_their_values_and_sixty_others_do_not() -> None:
    secret, plain = SECRETS.split(), NO_SECRETS.split()
    assert (len(secret), len(plain)) == (60, 60)
    shown = [name for name in secret if "v4" in masked([f"--{name}", "v4"])]
    shown += [name for name in secret if "v4" in masked([f"--{name}=v4"])[0]]
    hidden = [name for name in plain if masked([f"--{name}", "v4"]) != [f"--{name}", "v4"]]
    hidden += [name for name in plain if masked([f"--{name}=v4"]) != [f"--{name}=v4"]]
    assert (shown, hidden) == ([], [])


PLANTED: Final = "Fake0Fake1Fake2Fake3Fake4Fake5Fake6Fake7Fake8Fake9"
"""What must not be left of a secret, in any form and not in parts."""
HEX: Final = "0badc0de" * 10
PEM: Final = f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n{PLANTED}==\n-----END PRIVATE KEY-----"
PREFIXES: Final = """
hf_ sk- sk-proj- sk-ant-api03- sk-or-v1- sk-svcacct- ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat-
glrt- glptt- xoxb- xoxp- xapp-1-A0- nvapi- AIza ya29. GOCSPX- sk_live_ rk_test_ npm_ pypi-
dckr_pat_ SG. sq0csp- xai- gsk_ r8_ tskey-auth- tskey-api- dop_v1_ doo_v1_ pplx- fw_ tgp_v1_
lsv2_pt_ lsv2_sk_ pcsk_ rpa_ wandb_v1_ hvs. hvb. shpat_ shpss_ ATATT3 figd_ ntn_ sbp_ sb_secret_
lin_api_ glsa_ eyJ api_org_FakeFakeFakeFakeFake 1234567890:AA sntryu_
"""
FORMS: Final = [
    # tokens that say themselves what they are
    *([prefix + PLANTED] for prefix in PREFIXES.split()),
    ["dapi" + HEX[:32]],
    ["AKIA" + "FAKE" * 4],
    ["pul-" + HEX[:40]],
    ["rubygems_" + HEX[:48]],
    ["AGE-SECRET-KEY-1" + "FAKE" * 14],
    ["LS0tLS1CRUdJTi" + PLANTED],
    ["MTFake" + "a" * 18 + ".Fake00." + PLANTED],
    # names of options and variables
    ["x", "--pin", PLANTED],
    ["x", "--pin=" + PLANTED],
    ["x", "--so-pin", PLANTED],
    ["env", "DB_PASS=" + PLANTED, "x"],
    ["sh", "-c", f"x --pin {PLANTED} --lr 1"],
    ["postgres://u:p@" + PLANTED + "/w0rd@host/db"],
    ["postgres://u:p/" + PLANTED + "@w0rd@host:5432/db"],
    ["postgres://u:p@ss/" + PLANTED + "@host"],
    ["--db=postgres://me@org:p/@" + PLANTED + "@db.example.org/x?y=z"],
    ["git+https://u:" + PLANTED + "@git.example.org/org/repo.git@v1.0"],
    # options that stand for a password in some programs
    ["mysql", "-u", "root", "-p" + PLANTED, "db"],
    ["mysql", "-p", PLANTED],
    ["/usr/bin/mysqldump", "-h", "db", "-p" + PLANTED],
    ["sshpass", "-p", PLANTED, "ssh", "me@host"],
    ["docker", "login", "-u", "me", "-p", PLANTED],
    ["podman", "--log-level", "info", "login", "-p", PLANTED, "host"],
    ["az", "acr", "login", "-p", PLANTED],
    ["kubectl", "exec", "pod", "--", "mysql", "-p" + PLANTED],
    ["mongosh", "-u", "me", "-p", PLANTED],
    ["sqlcmd", "-P", PLANTED],
    ["redis-cli", "-a", PLANTED],
    ["ldapsearch", "-w", PLANTED],
    ["7z", "x", "-p" + PLANTED, "a.7z"],
    ["sh", "-c", f"cd d && sshpass -p '{PLANTED} {PLANTED}' ssh host"],
    ["sh", "-c", f"mysql -p{PLANTED} db < a.sql; mkdir -p d"],
    ["sh", "-c", f"docker login -u me -p {PLANTED} && docker run -p 80:80 x"],
    # what a program reads
    ["sh", "-c", f"echo {PLANTED} | docker login -u me --password-stdin"],
    ["sh", "-c", f"echo -n '{PLANTED};{PLANTED}' | docker login --password-stdin"],
    ["sh", "-c", f'printf %s "{PLANTED}" | gh auth login --with-token'],
    ["sh", "-c", f"echo {PLANTED} | sudo -S nvidia-smi"],
    ["sh", "-c", f"docker login --password-stdin <<< {PLANTED}"],
    # private keys
    ["x", "--tls", PEM],
    ["x", "--tls=" + PEM],
    [PEM.replace("PRIVATE", "RSA PRIVATE")],
    [PEM.replace("PRIVATE", "OPENSSH PRIVATE").replace("\n", "\\n")],
    [PEM.partition("-----END")[0]],
    [f'{{"cert": "{PEM}"}}'],
    # addresses
    ["https://" + PLANTED + "@host/a"],
    ["postgres://u:" + PLANTED + "@host/db"],
    ["postgres://u:pa/" + PLANTED + "@host/db"],
    ["--db=postgres://u:" + PLANTED + "/?#w@host:5432/db"],
    ["redis://:" + PLANTED + "@host"],
    ["ssh://git:" + PLANTED + "@host/a"],
    ["https://discord.com/api/webhooks/123456789012345678/" + PLANTED],
    ["https://discordapp.com/api/v10/webhooks/123456789012345678/" + PLANTED],
    ["https://api.telegram.org/bot123456789:" + PLANTED + "/sendMessage"],
    ["https://api.telegram.org/file/bot123456789:" + PLANTED + "/a"],
    ["tgram://123456789:" + PLANTED + "/42"],
    ["https://hooks.slack.com/triggers/T0/1/" + PLANTED],
    ["https://fake.webhook.office.com/webhookb2/" + PLANTED],
]
PLAIN_WORDS: Final = """
sk-learn-pipeline-gradient-boosting sk-learn-1.5.0-cp311-manylinux hf_finetune_llama_chat.py
hf_transformers_cache_dir npm_config_registry_url pypi-mirror-of-the-cluster
ASIA-PACIFIC-region-name fw_bw_overlap_of_all_layers r8_resnet_baseline_long_run_name
xai-integrated_gradients_baseline pplx-70b-online-chat-latest dapibus-lorem-ipsum-dolor
ntn_with_three_layers_and_gates rpa_relative_position_attention gsk_group_size_of_kernels
ATATTGCATTGCATTGCATTGCATTGCATTGCATTG tskey-rotation-interval-in-days figd_size sbp_and_dbp_of_all
SG.attention.layers.weight Model.config.some_very_long_name_of_an_attribute 20240101:120000
"""
PLAIN_OPTIONS: Final = """
--,  --think-token <think>, --vision-token <image>, --start-token <s>, --end-token </s>,
--token-budget 4096, --token-merge bipartite, --token-merging 0.5, --masked-token-prob 0.15,
--mask-token [MASK], --decoder-start-token <s>, --special-token <x>, --stop-token <stop>,
--token-ratio 0.7, --token-pruning 0.3, --token-mixer mlp, --token-shift 1, --time-per-token 5ms,
--n-pass 3, --num-pass 2, --pass-through true, --pass-rate 0.9, --pass-at-k 10, --two-pass true,
--high-pass 50, --forward-pass 1, --pin-memory true, --pin_memory 1, --cpu-pin 0-3, --spin 2,
--pinned yes, --sort-key date
"""
HARMLESS: Final = [
    # tokens and passes of models
    *(["train.py", *option.split()] for option in PLAIN_OPTIONS.split(",")),
    # words that begin like tokens
    *([word] for word in PLAIN_WORDS.split()),
    # options that are passwords elsewhere
    ["mkdir", "-p", "a/b"],
    ["ssh", "-p", "2222", "host"],
    ["ssh", "login", "-p", "2222"],
    ["sshpass", "-e", "ssh", "-p", "2222", "host"],
    ["docker", "run", "-p", "8080:80", "mysql"],
    ["docker", "run", "--name", "mysql", "-p", "3306:3306", "mariadb:11"],
    ["psql", "-p", "5432"],
    ["pytest", "-p", "no:cacheprovider"],
    ["mysql", "-P", "3306", "-p", "-h", "db"],
    ["torchrun", "-a", "b", "-w", "2", "-P", "4"],
    ["gmx", "mdrun", "-pin", "on"],
    ["env", "I_MPI_PIN=1", "PIN=0-3", "spin=1024", "I_MPI_PIN_DOMAIN=1024"],
    ["sh", "-c", "mysql -h db -e q; mkdir -p out"],
    ["sh", "-c", "docker login --help && docker run -p 80:80 x"],
    ["sh", "-c", "echo done | tee log"],
    ["sh", "-c", "echo 1 2 | xargs -n 1 train.py"],
    # addresses
    ["ssh://git@host/org/repo.git"],
    ["git+ssh://git@host:22/org/repo.git@v2"],
    ["hdfs://me@name-node/data"],
    ["abfss://data@account.dfs.core.windows.net/a"],
    ["http://host:8080/a@b"],
    ["https://host/org/image:tag@sha256"],
    ["tcp://10.0.0.1:29500"],
    ["https://discord.com/channels/1/2"],
    ["https://api.telegram.org/"],
    ["git@host:org/repo.git"],
    # public halves
    ["-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----"],
    ["-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----"],
]


REPEATED: Final = (
    "a", "-token-", "--token ", "a://b:c@d", "a://b:c@d.e/", "pin=",
    '"', "\\", "a://b:c/", "echo ", "mysql -p ", "xai-a_", "tskey-a-",
    "-----BEGIN PRIVATE KEY-----", "--password-stdin <",
)  # fmt: skip


@pytest.mark.parametrize("words", FORMS)
def test_of_a_secret_nothing_is_left(words: list[str]) -> None:
    shown = "\n".join(masked(words))
    assert "***" in shown
    assert [part for part in ("Fake", "FAKE", "0badc0de") if part in shown] == []


@pytest.mark.parametrize("words", HARMLESS)
def test_what_is_no_secret_is_kept(words: list[str]) -> None:
    assert masked(words) == words


def test_the_lists_are_long_enough_to_specify() -> None:
    assert len(FORMS) >= 93
    assert len(HARMLESS) >= 60


def test_what_follows_a_masked_password_is_kept() -> None:
    line = "sshpass -p a ssh -p 22 host; docker login -p b c && mkdir -p d"
    kept = "sshpass -p *** ssh -p 22 host; docker login -p *** c && mkdir -p d"
    assert masked(line.split()) == kept.split()
    assert masked(["sh", "-c", line]) == ["sh", "-c", kept]


@pytest.mark.parametrize("word", REPEATED)
def test_a_long_word_takes_linear_time(word: str) -> None:
    """A quarter of a second at most; a second look at every letter would take half a minute."""
    begin = time.process_time()
    masked([word * (100_000 // len(word))])
    assert time.process_time() - begin < 5
