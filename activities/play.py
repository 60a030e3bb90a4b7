"""Play one rollout of a source to its end, and say how it ended.

who raised                                                   outcome
reset, on_turn, reward, on_truncated, snapshot, restore      infra_error, the function named
AgentError from an environment                               agent_error, scored
a tool                                                       an answer to the model
a tool: InfrastructureError, ConnectionError, TimeoutError   infra_error
a missing, non-finite or boolean reward                      infra_error, the verifier named
a value of the wrong type                                    SourceBroken: the run fails
a used-up budget                                             truncated, with its cause
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from activities.album import kept
from activities.chat import Chat
from activities.environment import EnvRollout
from activities.harness import HarnessRollout, ProgramRecorder
from activities.session_source import BudgetedRecorder
from activities.turns import Conversation, Failed, Turns
from activities.verdicts import as_reward, guarded, verdict
from domain.config import RunConfig
from domain.environments import (
    AttemptRecorder,
    Env,
    HarnessSource,
    Outcome,
    PromptSource,
    SessionSource,
    Source,
    samples_at_gateway,
)
from domain.errors import AgentError, BudgetExhausted, ConfigError, SourceBroken
from domain.images import by_handle
from domain.rollouts import TRUNCATION_CAUSES, Status, Task
from domain.sampling import Limits, Spent, next_request
from domain.text import clean
from domain.tools import Message


async def play(
    source: Source, task: Task, recorder: AttemptRecorder, *, config: RunConfig, chat: Chat
) -> Outcome:
    """Run a source on a task. The outcome's reward, if any, is a finite `Reward`.

    Raises:
        CancelledError: the attempt was cancelled; the environment is closed.
        SourceBroken: the source broke its contract; the run must fail.
        LedgerError: as the recorder raised it (another execution owns the attempt).
    """
    if isinstance(source, Env):
        return await EnvRollout(source, task, recorder, config, chat).run()
    if isinstance(source, HarnessSource):
        if not isinstance(recorder, ProgramRecorder):
            raise SourceBroken("a HarnessSource is sampled through the gateway; there is none here")
        return await HarnessRollout(source, task, recorder, config, chat).run()
    single = isinstance(source, PromptSource)
    turns = Turns(recorder, Limits.of(config), max_turns=1 if single else config.budget.max_turns)
    images, root = config.budget.max_images, Path(config.root)
    try:
        if isinstance(source, PromptSource):
            limit_s = config.groups.environment_timeout
            conversation = Conversation(chat, max_images=images)
            messages = await kept(recorder, _messages(task), root)
            return await _play_prompt(source, task, turns, conversation, messages, limit_s)
        return await _play_session(source, task, turns, BudgetedRecorder(turns, chat, images, root))
    except Failed as failure:
        return Outcome(
            Status.INFRA_ERROR, detail=failure.detail, turns=turns.turns, lost=failure.lost
        )


def rehearse(source: Source, tasks: Sequence[Task], *, config: RunConfig, chat: Chat) -> None:
    """Refuse, before anything is started, what would fail every rollout.

    Args:
        source: Of the run.
        tasks: Some of the data set; prompts are rendered as they will be.
        config: Of the run.
        chat: Of the run's model.

    Raises:
        ConfigError: the model cannot hold this source's conversations, or a prompt cannot be
            rendered or leaves no room for an answer.
    """
    if isinstance(source, Env) and (source.tools or config.budget.max_turns > 1):
        chat.require_turns(tools=bool(source.tools))
    if samples_at_gateway(source) and config.budget.max_turns > 1:
        chat.require_turns(tools=False)
    if not isinstance(source, PromptSource):
        return
    limits = Limits.of(config)
    for task in tasks:
        conversation = Conversation(chat, max_images=config.budget.max_images)
        try:
            conversation.begin(by_handle(_messages(task), Path(config.root))[0])
        except (SourceBroken, Failed) as error:
            raise ConfigError(f"task {task.id!r}: {error}") from error
        except BudgetExhausted:
            continue  # truncated by that budget, as it will be
        length = len(conversation.prompt)
        if isinstance(next_request(limits, Spent(generated=0, context=length)), str):
            raise ConfigError(
                f"task {task.id!r} has a prompt of {length} tokens, which leaves no room for an "
                f"answer within the context of {limits.context}; raise trainer.width or "
                "budget.max_context_tokens"
            )


async def _play_prompt(
    source: PromptSource,
    task: Task,
    turns: Turns,
    conversation: Conversation,
    messages: list[Message],
    limit_s: float | None,
) -> Outcome:
    """One turn. A draw that a budget cut short is truncated, and still scored."""
    status, cause = Status.COMPLETED, None
    try:
        conversation.begin(messages)
        await turns.turn(conversation)
    except BudgetExhausted as limit:
        status, cause = Status.TRUNCATED, limit.cause
    turns.recorder.progress("verifier")
    where = f"the reward function {getattr(source.reward, '__qualname__', source.reward)!r}"
    answer = conversation.chat.text(conversation.sampled)
    value = await verdict(where, source.reward, answer, task, limit_s=limit_s)
    return Outcome(status, reward=as_reward(value, where), cause=cause, turns=turns.turns)


def _messages(task: Task) -> list[Message]:
    prompt = task.data.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt):
        return [dict(message) for message in prompt]
    raise SourceBroken(
        f"task {task.id!r} has the prompt {prompt!r:.80}; a prompt set needs rows with "
        '"prompt": a string or a list of messages'
    )


async def _play_session(
    source: SessionSource, task: Task, turns: Turns, recorder: BudgetedRecorder
) -> Outcome:
    """The source drives; budgets are kept by the recorder that it is given."""
    name = f"{type(source).__name__}.run"
    if turns.recorder.recorded:
        raise Failed(f"the worker died, and {name} cannot be taken up again", lost=True)
    try:
        outcome: object = await guarded(name, source.run(task, recorder))
    except BudgetExhausted as limit:
        return Outcome(Status.TRUNCATED, cause=limit.cause, turns=turns.turns)
    except AgentError as error:
        # Nobody but the source could have judged what was done until then.
        raise Failed(clean(f"{name} raised AgentError without a reward: {error}")) from error
    if not isinstance(outcome, Outcome):
        raise SourceBroken(f"{name} returned a {type(outcome).__name__}; return an Outcome")
    return replace(_checked(outcome, name), turns=turns.turns)


def _checked(outcome: Outcome, name: str) -> Outcome:
    try:
        status = Status(outcome.status)
    except ValueError as error:
        raise SourceBroken(f"{name} returned the status {outcome.status!r}") from error
    if (status is Status.TRUNCATED) != (outcome.cause is not None) or (
        outcome.cause is not None and outcome.cause not in TRUNCATION_CAUSES
    ):
        raise SourceBroken(
            f"{name} returned {status} with the cause {outcome.cause!r}; a truncated rollout has "
            f"one of {', '.join(TRUNCATION_CAUSES)}, any other has none"
        )
    detail = clean(str(outcome.detail))
    if status in (Status.INFRA_ERROR, Status.CANCELLED):
        return replace(outcome, status=status, reward=None, detail=detail)
    reward = outcome.reward
    if reward is None and status is Status.TRUNCATED:
        return replace(outcome, status=status, detail=detail)
    return replace(outcome, status=status, reward=as_reward(reward, name), detail=detail)
