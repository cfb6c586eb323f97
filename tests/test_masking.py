"""Secrets on command lines are masked, and what only resembles them is kept."""

from __future__ import annotations

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
