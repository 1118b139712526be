"""A language model as a judge, behind an OpenAI-compatible endpoint: POST {endpoint}/chat/completions.

Every pair is judged in both orders. A cache saves answers as they arrive, so an interrupted run can continue, and a
second run sends no requests. The key is read from the environment for each request and sent only to the endpoint.
"""

import hashlib
import http.client
import ipaddress
import json
import logging
import math
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from ...errors import ZooError
from ...fileio import int_or_none, read_json, write_json
from ...hub.client.retry_after import seconds_to_wait
from ...runs.status_line import Progress
from .llm_questions import CRITERION, MIDDLE_RATING, PROMPT_VERSION, Question, pair_question, rating_question
from .llm_usage import Meter, Stopped, Usage
from .pairwise import PairVerdict, check_lengths, merge_orders

log = logging.getLogger(__name__)

_SCHEMA = 1
_CHAT_PATH = "/chat/completions"
_GRACE_SECONDS = 5.0  # how long a run that stops waits for pending answers, which cost money anyway
_MAX_WAIT_SECONDS = 300.0  # a run ends if the server asks for a longer wait
_MAX_RESPONSE_BYTES = 2**22
_MIN_ANSWERS = 10  # with at least this many answers, a majority of unreadable answers makes the model unfit
_MAX_SAVED_CHARACTERS = 2000  # of an answer
# `fileio.write_json` reads the umask by setting it, which two threads must not do at once.
_WRITE_LOCK = threading.Lock()

_Entry = dict[str, Any]  # a judgment as saved in the cache


class LLMJudge:
    """Compares pairs (`judges.pairwise.PairJudge`), and rates single completions 1 to 10 (`judges.scalar.Judge`).

    After an unreadable answer, the judge asks once more. A second unreadable answer counts as a tie, marked `unparsed`,
    or as the middle of the scale. If most of 10 or more answers are unreadable, ZooError is raised.

    Args:
        endpoint: The base address, such as https://api.openai.com/v1.
        model: The model's name at the endpoint.
        name: The judge's name.
        criterion: What makes a completion better.
        api_key_env: The environment variable with the key; if it is not set, no key is sent.
        cache: A folder for the answers; None keeps them in memory.
        price: Price per million prompt tokens and per million completion tokens; None if unknown.
        budget: Largest total cost; None for no limit. A request that could exceed it is not sent.
        concurrency: Number of parallel requests.
        attempts: Number of attempts per request.
        timeout: Seconds to wait for an answer.
        backoff: Seconds before the second attempt, doubled before each further attempt. Retry-After takes precedence.
        max_tokens: Largest number of tokens in an answer.
        parameters: Further fields of the request, such as {"seed": 1}; a field with the value None is left out. Some
            models need {"max_tokens": None, "max_completion_tokens": 2000}.
        progress: Whether to show a progress bar.

    Raises:
        ZooError: The settings are invalid.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        name: str = "llm",
        criterion: str = CRITERION,
        api_key_env: str = "OPENAI_API_KEY",
        cache: Path | str | None = None,
        price: tuple[float, float] | None = None,
        budget: float | None = None,
        concurrency: int = 4,
        attempts: int = 6,
        timeout: float = 60.0,
        backoff: float = 1.0,
        max_tokens: int = 64,
        parameters: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        self._url, self._host, self._loopback = _parse_endpoint(endpoint)
        self._model, self._criterion, self._key_name, self.name = model, criterion, api_key_env, name
        self._cache = Path(cache) if cache is not None else None
        self._concurrency, self._attempts, self._timeout, self._backoff = concurrency, attempts, timeout, backoff
        self._progress = progress
        if not model:
            raise ZooError("An LLM judge needs the name of a model at its endpoint.")
        if concurrency < 1 or attempts < 1 or not timeout > 0 or not backoff >= 0:
            raise ZooError(
                "An LLM judge needs concurrency and attempts of at least 1, a positive timeout and a backoff of at "
                "least 0."
            )
        for value in (*(price or ()), budget or 0.0):
            if not (math.isfinite(value) and value >= 0):
                raise ZooError(f"Prices and the budget of an LLM judge must be numbers of at least 0, not {value}.")
        if budget is not None and price is None:
            raise ZooError(
                "A budget needs prices: set price, per million prompt tokens and per million completion tokens."
            )
        fields = {"temperature": 0, "max_tokens": max_tokens, **(parameters or {})}
        reserved_keys = {"model", "messages", "stream", "n"} & fields.keys()
        if reserved_keys:
            names = ", ".join(sorted(reserved_keys))
            raise ZooError(f"parameters must not contain {names}: the judge sets these itself.")
        self._fields = {key: value for key, value in fields.items() if value is not None}
        limits = (self._fields.get(key) for key in ("max_tokens", "max_completion_tokens"))
        max_answer_tokens = max(int_or_none(limit) or 0 for limit in limits)
        if budget is not None and max_answer_tokens == 0:
            raise ZooError("A budget needs a bound on the answer: set max_tokens or max_completion_tokens.")
        self._meter = Meter(price, budget, max_answer_tokens)
        self._memory: dict[str, _Entry] = {}
        self._not_before = 0.0  # in monotonic seconds; the server asked for no request before this time
        proxies = urllib.request.ProxyHandler({}) if self._loopback else urllib.request.ProxyHandler()
        self._opener = urllib.request.build_opener(proxies, _NoRedirect())

    @property
    def description(self) -> str:
        """One sentence for a card: the model, its host, the criterion and the prompt template."""
        return (
            f"The language model {self._model} at {self._host}, judging by {self._criterion}; each pair in both "
            f"orders, a tie if they disagree (prompt template {PROMPT_VERSION})."
        )

    @property
    def usage(self) -> Usage:
        """The requests, tokens and cost since the judge was created."""
        return self._meter.usage

    def check_endpoint(self) -> None:
        """Checks, at no cost, that the endpoint answers and accepts the key.

        A server on this machine may be started later, so if it does not answer, this only logs a warning.

        Raises:
            ZooError: Nothing answers at the endpoint, or the key is refused.
        """
        try:
            status, headers, content = self._exchange()
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            message = f"The judge {self.name} is not available: {self._host} does not answer ({problem})"
            if self._loopback:
                log.warning("%s. Start it before training ends.", message)
                return
            raise ZooError(f"{message}: check the network and the address, or name another judge.") from error
        if status == 401:  # not 403: a key may be valid for completions only
            raise ZooError(
                f"The judge {self.name} is not available: {self._describe_refusal(status, headers, content)}"
            )

    def compare(self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[PairVerdict]:
        """Compares each pair in both orders. Equal texts are a tie without a request.

        Received answers are kept even after an error, so the next call requests only those that are missing.

        Args:
            prompts: (N,) texts.
            first: (N,) one completion of each prompt.
            second: (N,) the other completion.

        Returns:
            (N,) verdicts.

        Raises:
            ZooError: The endpoint refuses or does not answer, most answers are unreadable, or the budget is spent
                (`BudgetSpent`).
        """
        check_lengths(prompts, first, second)
        # Each pair becomes two questions, one per order.
        pairs = [
            None if a == b else [pair_question(self._criterion, prompt, *order) for order in ((a, b), (b, a))]
            for prompt, a, b in zip(prompts, first, second, strict=True)
        ]
        scores = iter(self._ask([question for pair in pairs if pair for question in pair]))
        verdicts = []
        for pair in pairs:
            if pair is None:
                verdicts.append(PairVerdict(0.5, {"identical": True}))
            else:
                orders = (next(scores), next(scores))
                details = {"unparsed": True} if None in orders else {}
                verdicts.append(merge_orders(*orders, **details))
        return verdicts

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Rates each completion from 1 to 10; 5.5 if the answer is unreadable. Raises as `compare` does."""
        check_lengths(prompts, completions)
        questions = [rating_question(self._criterion, *texts) for texts in zip(prompts, completions, strict=True)]
        return [MIDDLE_RATING if score is None else score for score in self._ask(questions)]

    def _digest(self, question: Question) -> str:
        """Hashes everything on which the answer depends."""
        kind, system, user = question.kind, question.system, question.user
        content = [_SCHEMA, PROMPT_VERSION, kind, self._url, self._model, self._fields, system, user]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _load(self, digest: str, question: Question) -> _Entry | None:
        if self._cache is None:
            return None
        path = _cache_file(self._cache, digest)
        try:
            entry = read_json(path)
            if entry["schema"] != _SCHEMA or len(entry["tokens"]) != 2:
                return None
            # The score is parsed from the answer again, so an edited file cannot claim another score.
            return {**entry, "score": question.parse(entry["answers"][-1])}
        except (FileNotFoundError, ZooError, LookupError, TypeError, AttributeError):
            return None  # a damaged file is replaced by a new answer
        except OSError as error:
            raise ZooError(
                f"{path} cannot be read ({error.strerror}): correct the cache's permissions, or choose another folder."
            ) from error

    def _save(self, digest: str, entry: _Entry) -> None:
        self._memory[digest] = entry
        if self._cache is not None:
            with _WRITE_LOCK:
                write_json(_cache_file(self._cache, digest), entry)

    def _ask(self, questions: Sequence[Question]) -> list[float | None]:
        """Returns the score of each question; None if the answer is unreadable.

        Raises ZooError if most of 10 or more answers are unreadable, because so many ties or middle ratings would look
        like data.
        """
        digests = [self._digest(question) for question in questions]
        # Equal questions are sent once.
        unique_questions = dict(zip(digests, questions, strict=True))
        for digest, question in unique_questions.items():
            entry = None if digest in self._memory else self._load(digest, question)
            if entry is not None:
                self._memory[digest] = entry
                self._meter.count_cached(entry)
        new_questions = {
            digest: question for digest, question in unique_questions.items() if digest not in self._memory
        }
        if new_questions:
            try:
                self._ask_endpoint(new_questions, len(unique_questions))
            except ZooError as error:
                location = f"in {self._cache}" if self._cache is not None else "in memory"
                count = len(unique_questions.keys() & self._memory.keys())
                raise type(error)(
                    f"{error} ({count} of {len(unique_questions)} answers are kept {location}.)"
                ) from error
        entries = [self._memory[digest] for digest in unique_questions]
        unreadable = [entry["answers"][-1] for entry in entries if entry["score"] is None]
        # A few unreadable answers are noise; a majority means that the model is unfit as a judge.
        if len(unique_questions) >= _MIN_ANSWERS and 2 * len(unreadable) > len(unique_questions):
            raise ZooError(
                f"{len(unreadable)} of {len(unique_questions)} answers of {self._model} cannot be parsed, such as "
                f"{_one_line(unreadable[0])[:60]!r}: use a model that follows the requested format, or raise "
                "max_tokens."
            )
        return [self._memory[digest]["score"] for digest in digests]

    def _ask_endpoint(self, questions: Mapping[str, Question], total: int) -> None:
        """Asks in several threads, and saves each answer as it arrives. Stops at the first failure and raises it."""
        pending, stop = deque(questions.items()), threading.Event()
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

        def work() -> None:
            while not stop.is_set():
                try:
                    digest, question = pending.popleft()
                except IndexError:  # all questions are taken
                    return
                try:
                    self._save(digest, self._judge(question, stop))  # in the worker, where Ctrl-C cannot interrupt
                    outcomes.put(None)
                except Stopped:
                    return
                except BaseException as error:  # raised again below, in the calling thread
                    stop.set()
                    outcomes.put(error)

        # Daemon threads, because a thread that waits for the network must not keep an interrupted process alive.
        workers = [threading.Thread(target=work, daemon=True) for _ in range(min(self._concurrency, len(questions)))]
        cached_count = total - len(questions)
        with Progress(
            total, f"judging with {self._model}", "answer", initial=cached_count, leave=False, hidden=not self._progress
        ) as bar:
            try:
                for worker in workers:
                    worker.start()
                for _ in questions:
                    if (failure := outcomes.get()) is not None:
                        raise failure
                    bar.update()
            finally:
                stop.set()
                deadline = time.monotonic() + _GRACE_SECONDS
                for worker in workers:
                    if worker.ident is not None:
                        worker.join(max(0.0, deadline - time.monotonic()))

    def _judge(self, question: Question, stop: threading.Event) -> _Entry:
        answers: list[str] = []
        tokens = [0, 0]
        # After an unreadable answer, ask once more with a reminder of the format.
        for content in (question.user, f"{question.user}\n\n{question.reminder}"):
            messages = [{"role": "system", "content": question.system}, {"role": "user", "content": content}]
            # The bound stays reserved until the request ends, so that parallel requests together cannot overspend.
            with self._meter.reserve(messages, stop) as bound:
                answer, counts, served_model = self._post(messages, stop)
                self._meter.charge(counts, bound)
            answers.append(answer)
            if counts is not None:
                tokens = [tokens[0] + counts[0], tokens[1] + counts[1]]
            score = question.parse(answer)
            if score is not None:
                break
        self._meter.add(answers=1, unparsed=int(score is None))
        return {
            "schema": _SCHEMA,
            "prompt_version": PROMPT_VERSION,
            "endpoint": self._url,
            "model": self._model,
            "served_model": served_model,
            "answers": answers,
            "score": score,
            "tokens": tokens,
        }

    def _post(
        self, messages: list[dict[str, str]], stop: threading.Event
    ) -> tuple[str, tuple[int, int] | None, str | None]:
        """Returns the answer, its (prompt, completion) tokens and the served model, after up to `attempts` requests."""
        body = json.dumps({"model": self._model, "messages": messages, **self._fields}).encode()
        for attempt in range(self._attempts):
            while (remaining := self._not_before - time.monotonic()) > 0 and not stop.is_set():
                stop.wait(remaining)
            if stop.is_set():
                raise Stopped
            self._meter.add(requests=1, retries=int(attempt > 0))
            wait = None
            try:
                status, headers, content = self._exchange(body)
                if status == 200:
                    return self._parse_response(content)
                # A redirect, or any other 4xx code, is our mistake or a refusal, so another attempt would not help.
                if status != 429 and status < 500:
                    raise ZooError(self._describe_refusal(status, headers, content))
                problem = f"status {status}{self._server_message(content)}"
                wait = seconds_to_wait(headers.get("Retry-After"))
            except ssl.SSLCertVerificationError as error:
                raise ZooError(
                    f"The certificate of {self._host} is not trusted ({error.verify_message}): correct the certificate "
                    "or the address."
                ) from error
            except (OSError, http.client.HTTPException) as error:
                problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                problem = "an answer that is not a chat completion"
            if wait is not None:
                if wait > _MAX_WAIT_SECONDS:
                    raise ZooError(
                        f"{self._host} answered {problem} and asks for a wait of {wait:.0f} s: run this again later."
                    )
                self._not_before = max(self._not_before, time.monotonic() + wait)  # for all threads
            # Random jitter keeps threads that failed together from retrying together.
            elif attempt + 1 < self._attempts:
                stop.wait(min(_MAX_WAIT_SECONDS, self._backoff * 2**attempt * random.uniform(0.5, 1.0)))
        raise ZooError(
            f"{self._model} at {self._host} failed {self._attempts} times, last with {problem}: run this again when "
            "the endpoint works."
        )

    def _exchange(self, body: bytes | None = None) -> tuple[int, Message, bytes]:
        """Posts a request and returns status, headers and content; without a body, lists the models instead."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "rlhf-zoo"}
        url = f"{self._url.removesuffix(_CHAT_PATH)}/models" if body is None else self._url
        request = urllib.request.Request(url, data=body, headers=headers)
        key = self._key()
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise ZooError(f"The key in {self._key_name} contains a space or a special character: set it again.")
        if key and self._url.startswith("http:") and not self._loopback:
            raise ZooError(
                f"The key in {self._key_name} would be sent to {self._host} unencrypted: use an https address or, if "
                "the endpoint needs no key, name a variable that is not set."
            )
        if key:
            # Unredirected, so that the key never follows a redirect to another host.
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return response.status, response.headers, response.read(_MAX_RESPONSE_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read(_MAX_RESPONSE_BYTES)
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from error

    def _key(self) -> str:
        """Returns the key; "" if the variable is not set. It is read for each request, so no object holds it."""
        return os.environ.get(self._key_name, "").strip()

    def _parse_response(self, content: bytes) -> tuple[str, tuple[int, int] | None, str | None]:
        """Parses a response into the values that `_post` returns. `_post` catches errors from malformed responses."""
        document = json.loads(content)
        text = document["choices"][0]["message"].get("content")
        usage, served_model = document.get("usage") or {}, document.get("model")
        answer = self._clean(text if isinstance(text, str) else "")[:_MAX_SAVED_CHARACTERS]
        prompt, completion = (int_or_none(usage.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        tokens = None if prompt is None or completion is None else (prompt, completion)
        return answer, tokens, self._clean(served_model)[:200] if isinstance(served_model, str) else None

    def _clean(self, text: str) -> str:
        """Removes lone surrogates from the endpoint's text, and the key in case the endpoint repeats it."""
        key = self._key()
        text = text.encode("utf-8", "replace").decode()
        return text.replace(key, "***") if key else text

    def _server_message(self, content: bytes) -> str:
        """Returns the server's error message as " (…)" on one line; "" if there is none."""
        try:
            error = json.loads(content)["error"]
            line = _one_line(self._clean(error if isinstance(error, str) else error["message"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ""
        return f" ({line[:200]})" if line else ""

    def _describe_refusal(self, status: int, headers: Message, content: bytes) -> str:
        if 300 <= status < 400:
            target = urlsplit(headers.get("Location") or "").netloc.rpartition("@")[2] or "another path"
            return f"{self._host} redirects to {target}, but the judge follows no redirects: use the final address."
        response = f"{self._host} answered {status}{self._server_message(content)}"
        if status in (401, 403):
            state = "is set but was not accepted" if self._key() else "is not set"
            return f"{response}: the key is read from the environment variable {self._key_name}, which {state}."
        return f"{response}: check the endpoint {self._url}, the model {self._model!r} and the request's parameters."


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def _parse_endpoint(endpoint: str) -> tuple[str, str, bool]:
    """Returns an endpoint's request address, its host for messages, and whether the host is this machine.

    Raises ZooError if the endpoint is not written as it should be.
    """
    try:
        parts = urlsplit(endpoint.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    form = "write it as https://HOST/v1, without a user, a query or a fragment"
    if "@" in parts.netloc:
        raise ZooError(f"The endpoint of an LLM judge must not contain a user or a password: {form}.")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ZooError(f"{endpoint!r} is not an endpoint of an LLM judge: {form}.")
    path = parts.path.rstrip("/").removesuffix(_CHAT_PATH)
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    address = f"{parts.scheme}://{parts.netloc}{path}{_CHAT_PATH}"
    return address, host if port is None else f"{host}:{port}", loopback


def _cache_file(cache: Path, digest: str) -> Path:
    return cache / digest[:2] / f"{digest}.json"


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
