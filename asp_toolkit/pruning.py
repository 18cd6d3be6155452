"""prune: choose the layers, score, mask, zero. Every layer left dense has its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from asp_toolkit.errors import AspError, closest
from asp_toolkit.masks import MaskSet, bare, whole
from asp_toolkit.patterns import Pattern, masks_of, parse
from asp_toolkit.scores import SCORES, Score, Stats, needs_of
from asp_toolkit.views import View, labels, multiplied, own_names, views, why_not_masked


@dataclass(frozen=True)
class Rule:
    """Which layers get which pattern.

    include, exclude: globs over layer or parameter names ("layer1.*", "fc"), or layer types ("Linear", also the base
    class of a subclass); exclude wins. pattern and score: as a recipe spells them, or the objects themselves.
    """

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    pattern: str | Pattern = "2:4"
    score: str | Score = "magnitude"


@dataclass(frozen=True)
class Chosen:
    """One parameter to be pruned: `own` of `module`, seen through `view`, by rule number `rule`."""

    view: View
    module: nn.Module
    own: str
    pattern: Pattern
    score: Score
    rule: int = 0

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as the module has it now."""
        parameter: nn.Parameter = getattr(self.module, self.own)
        return parameter


@dataclass(frozen=True)
class Choice:
    """What will be pruned how, and why the rest stays dense."""

    chosen: dict[str, Chosen] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def resolve_pattern(pattern: str | Pattern) -> Pattern:
    """A pattern by its spelling, or the object itself.

    Raises:
        AspError: there is none of that name.
    """
    if isinstance(pattern, str) or not hasattr(pattern, "why_not"):
        return parse(pattern)  # which says what is wrong with a number, say: an unquoted 2:4 of YAML 1.1
    return pattern


def resolve_score(score: str | Score) -> Score:
    """A score by its name in SCORES or as package.module:function.

    Raises:
        AspError: there is none of that name.
    """
    if not isinstance(score, str):
        return score
    if score in SCORES:
        return SCORES[score]
    module, colon, name = score.partition(":")
    if not colon:
        raise AspError(f"unknown score '{score}'; {closest(score, SCORES)}; or write package.module:function")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise AspError(f"score '{score}': {error}") from error
    if not callable(found):
        raise AspError(f"score '{score}': expected a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return None
    return f"expected 16-, 32- or 64-bit floats to score, got {dtype}"


def _matches(globs: Iterable[str], labels: set[str]) -> bool:
    return any(fnmatchcase(label, glob) for glob in globs for label in labels)


def _refuse_globs_without_match(rules: Sequence[Rule], everything: Sequence[set[str]]) -> None:
    if not everything:
        return  # a model without parameters: `choose` says so
    known = set().union(*everything)
    for number, rule in enumerate(rules):
        for key in ("include", "exclude"):
            for glob in getattr(rule, key):
                if not any(fnmatchcase(label, glob) for label in known):
                    place = f"prune.rules.{number}.{key}"
                    hint = closest(glob, known)
                    raise AspError(f"{place}: '{glob}' matches no layer name and no layer type; {hint}")


def choose(model: nn.Module, rules: Sequence[Rule]) -> Choice:
    """Decide for every parameter, changing nothing.

    Raises:
        AspError: a glob matches nothing, two rules match one layer, or a pattern or score is unknown.
    """
    model = bare(model)
    resolved = [(rule, resolve_pattern(rule.pattern), resolve_score(rule.score)) for rule in rules]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}  # several where tensors are tied
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    everything = [(name, module, labels(model, names[id(parameters[name])]), v) for name, module, v in views(model)]
    _refuse_globs_without_match(rules, [called for _, _, called, _ in everything])
    choice = Choice()
    for name, module, called, found in everything:
        if isinstance(found, str):
            choice.skipped[name] = found
            continue
        including = [i for i, (rule, _, _) in enumerate(resolved) if _matches(rule.include, called)]
        matching = [i for i in including if not _matches(resolved[i][0].exclude, called)]
        if len(matching) > 1:
            places = " and ".join(f"prune.rules.{i}" for i in matching)
            raise AspError(
                f"'{name}' is matched by {places}; exclude it from all but one, so that the order does not matter"
            )
        if not matching:
            choice.skipped[name] = "excluded by a rule" if including else "matched by no rule"
            continue
        rule, pattern, score = resolved[matching[0]]
        reason = _why_not_dtype(parameters[name].dtype)
        if found.reason and not own_names(model, names[id(parameters[name])]) & set(rule.include):
            reason = found.reason
        unfit = pattern.why_not(found.rows, found.cols, found.run)
        if reason or unfit:
            choice.skipped[name] = reason or f"{pattern.name} does not fit: {unfit}"
        else:
            own = name.rpartition(".")[2]
            choice.chosen[name] = Chosen(found, module, own, pattern, score, matching[0])
    if not choice.chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(choice.skipped.items())[:8])
        raise AspError(f"nothing to prune: every parameter stays dense ({reasons or 'the model has no parameters'})")
    return choice


def _globs(given: str | Sequence[str] | None, default: Sequence[str]) -> Sequence[str]:
    if given is None:
        return default
    return (given,) if isinstance(given, str) else tuple(given)  # "fc" is one glob, not a sequence of two


def _is_finite(tensor: Tensor) -> bool:
    """As torch.isfinite(tensor).all(), which takes twenty times as long: the extremes pass NaN and infinity on."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


@torch.no_grad()
def scores_of(name: str, chosen: Chosen, stats: Mapping[str, Stats] | None = None) -> Tensor:
    """The (rows, cols) scores of one parameter as its weights are now.

    Raises:
        AspError: they have another shape, or NaN entries.
    """
    # Gradients are those of the parameter; without them, what the layer multiplies with is what matters.
    by_gradient = any(need != "input_norm" for need in needs_of(chosen.score))
    tensor = chosen.parameter if by_gradient else multiplied(chosen.module, chosen.own)
    weight = chosen.view.matrix(whole(tensor.detach()))
    scores = chosen.score(weight, (stats or {}).get(name))
    if scores.shape != (chosen.view.rows, chosen.view.cols):
        shapes = f"expected shape {(chosen.view.rows, chosen.view.cols)}, got {tuple(scores.shape)}"
        raise AspError(f"score of '{name}': {shapes}; nothing was pruned")
    if scores.numel() and bool(torch.isnan(scores.amin())):  # amin passes NaN on, and is several times as fast as any()
        raise AspError(f"score of '{name}' has NaN entries, which have no order; nothing was pruned")
    return scores


@torch.no_grad()
def choose_masks(chosen: Mapping[str, Chosen], scores: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The mask of every chosen parameter, in the parameter's shape; `scores` gives its (rows, cols) scores by name.

    A pattern that chooses among several matrices (unstructured global) gets all those of its rule at once.

    Raises:
        AspError: a mask would break what a parametrization computes (a row of zeros under weight_norm).
    """
    together: dict[int, list[str]] = {}
    masks: dict[str, Tensor] = {}
    for name, one in chosen.items():
        if hasattr(one.pattern, "masks"):
            together.setdefault(one.rule, []).append(name)
        masks[name] = torch.empty(0)  # the order stays that of the model
    for names in [*together.values(), *([name] for name in chosen if not hasattr(chosen[name].pattern, "masks"))]:
        found = masks_of(chosen[names[0]].pattern, [scores(name) for name in names])
        for name, mask in zip(names, found, strict=True):
            masks[name] = chosen[name].view.unmatrix(mask).contiguous()
            if reason := why_not_masked(chosen[name].module, chosen[name].own, masks[name]):
                raise AspError(f"'{name}' cannot be pruned to {chosen[name].pattern.name}: {reason}")
    return masks


@torch.no_grad()
def prune(
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    score: str | Score = "magnitude",
    rules: Sequence[Rule] | None = None,
    stats: Mapping[str, Stats] | None = None,
) -> MaskSet:
    """Prune `model` once, in place: masks from scores, dropped entries set to +0.0 (arXiv 2104.08378, sec. 4).

    `pattern`, `include`, `exclude`, `score` make one rule; `rules` gives several instead. A score that needs more than
    the weights (taylor, fisher, movement, activation_norm) takes `stats=calibrate(model, rules, batches, loss)`.
    Nothing is changed when an error is raised. The process's random state is not touched.

    Returns:
        A MaskSet that accounts for every parameter: a mask, or the reason it stays dense.

    Raises:
        AspError: as `choose`; or a chosen weight has NaN or infinite entries, or no data (meta device); or a score
            lacks its statistics.
    """
    if rules is not None and (include is not None or exclude is not None):
        raise AspError("prune: give either rules or include/exclude, not both")
    if rules is None:
        rules = [Rule(_globs(include, ("*",)), _globs(exclude, ()), pattern, score)]
    choice = choose(model, rules)
    for name, one in choice.chosen.items():
        if one.parameter.is_meta:
            raise AspError(f"'{name}' is on the meta device, without values to score; load its weights first")
        if not _is_finite(whole(one.parameter.detach())):
            raise AspError(f"'{name}' has NaN or infinite entries; nothing was pruned")
    masks = choose_masks(choice.chosen, lambda name: scores_of(name, choice.chosen[name], stats))
    made = MaskSet(masks, choice.skipped, {name: one.pattern.name for name, one in choice.chosen.items()})
    made = made.placed_like(model)
    made.apply_(model)
    return made


@torch.no_grad()
def masks_from_zeros(model: nn.Module, pattern: str | Pattern = "2:4", include: Sequence[str] | None = None) -> MaskSet:
    """Masks of a model that is sparse already: the zeros it has are the dropped entries.

    A group with more zeros than the pattern asks for keeps only its nonzero entries: none of its zeros comes back
    in training. A layer whose zeros do not obey the pattern is skipped with that reason; the model is not changed.
    """
    choice = choose(model, [Rule(_globs(include, ("*",)), (), pattern)])
    masks, patterns, skipped = {}, {}, dict(choice.skipped)
    for name, one in choice.chosen.items():
        keep: Tensor = whole(one.parameter.detach()) != 0
        if one.pattern.holds(one.view.matrix(keep)):
            masks[name], patterns[name] = keep, one.pattern.name
        else:
            skipped[name] = f"its zeros do not obey {one.pattern.name}"
    if not masks:
        raise AspError(f"no layer's zeros obey the pattern: {skipped}")
    return MaskSet(masks, skipped, patterns)
