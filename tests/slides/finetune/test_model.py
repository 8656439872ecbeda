"""The model, its losses, and the groups of its parameters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.slides import SlideEncoder, gradient_times_input, load_slide_encoder
from dilated_attention_pytorch.slides.finetune.cases import CaseFiles
from dilated_attention_pytorch.slides.finetune.labels import LabelledCase, Labels, Task
from dilated_attention_pytorch.slides.finetune.model import (
    SlideModel,
    add_adapters,
    cox_loss,
    loss_of,
    merge_adapters,
    parameter_groups,
)
from dilated_attention_pytorch.slides.finetune.trainer import Inputs, best_epoch
from slides.finetune.made_cohort import Cohort, small_settings
from slides.made_slides import CONFIG, SIZE, tiles_of


def model_of(layers: tuple[int, ...] = (1, 2), scores: int = 1) -> SlideModel:
    torch.manual_seed(3)
    return SlideModel(SlideEncoder(CONFIG), CONFIG.embed_dim, layers, scores).eval()


def tiles(number: int, seed: int) -> tuple[Tensor, Tensor]:
    features, corners = tiles_of(number, seed)
    return features, corners // SIZE


def test_the_scores_are_a_linear_map_of_the_pooled_layers_in_order() -> None:
    model, (features, grid) = model_of((2, 1), scores=3), tiles(40, 0)
    assert model.slide_encoder is not None
    layers = model.slide_encoder(features[None], grid[None], tile_size=1).layers[0]
    linear = model.classifier[0]
    assert isinstance(linear, torch.nn.Linear)
    expected = linear.weight @ torch.cat((layers[2], layers[1])) + linear.bias
    torch.testing.assert_close(model(features, grid)[0], expected)
    names = {name.partition(".")[0] for name in model.state_dict()}
    assert names == {"slide_encoder", "classifier"}
    assert model.state_dict()["classifier.0.weight"].shape == (3, 64)


def test_learning_rates_and_weight_decay_are_those_of_gigapath() -> None:
    model = model_of()
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.05, layer_decay=0.5)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        # num_layers + 1 = 3 in their count: the class token at 0, layer k at k + 1 from 0, all others at the end.
        depth = 3
        if name == "slide_encoder.cls_token":
            depth = 0
        elif name.startswith("slide_encoder.encoder.layers."):
            depth = int(name.split(".")[3]) + 1
        assert found[id(parameter)] == (0.5 ** (3 - depth), 0.05 if parameter.dim() > 1 else 0.0), name


def test_layers_above_the_last_one_read_keep_their_weights() -> None:
    model, (features, grid) = model_of((1, 0)).train(), tiles(30, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.5, layer_decay=0.5)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(features, grid).sum().backward()
    optimizer.step()
    is_same = {name: torch.equal(value, before[name]) for name, value in model.state_dict().items()}
    assert not is_same["slide_encoder.encoder.layers.0.ffn.fc1.weight"]
    assert all(same for name, same in is_same.items() if name.startswith("slide_encoder.encoder.layers.1."))


def test_the_partial_likelihood_of_the_cox_model_equals_its_sum() -> None:
    torch.manual_seed(0)
    scores = torch.randn(11, 1, dtype=torch.float64)
    times, events = torch.randint(1, 6, (11,)).double(), torch.arange(11) % 3 > 0
    total, number = 0.0, 0
    for i in range(11):
        if events[i]:
            at_risk = sum(math.exp(scores[j, 0]) for j in range(11) if times[j] >= times[i])
            total, number = total - float(scores[i, 0]) + math.log(at_risk), number + 1
    targets = torch.stack((times, events.double()), dim=1)
    assert float(cox_loss(scores, targets)) == pytest.approx(total / number, rel=1e-12)
    scores.requires_grad_()
    without = cox_loss(scores, targets * torch.tensor([1.0, 0.0]))
    assert without.item() == 0.0
    without.backward()
    assert scores.grad is not None
    assert not scores.grad.any()


def test_classes_weigh_the_same_however_many_cases_they_have() -> None:
    targets = torch.tensor([0] * 6 + [1] * 2)
    loss = loss_of("classification", targets, is_weighted=True)
    scores = torch.randn(8, 2)
    each = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
    torch.testing.assert_close(loss(scores, targets), (each[:6].mean() + each[6:].mean()) / 2)
    plain = loss_of("classification", targets, is_weighted=False)
    torch.testing.assert_close(plain(scores, targets), each.mean())
    labels = torch.nn.functional.one_hot(targets, 2).float()
    of_labels = loss_of("multilabel", labels, is_weighted=True)(torch.zeros(8, 2), labels)
    # Each label is there in 6 x 2 / 6 = 2 or in 2 x 6 / 2 = 6 cases, and absent in as many, of 8.
    torch.testing.assert_close(of_labels, torch.tensor(math.log(2) * (4 + 12) / 16))


def test_a_regression_is_trained_on_standardised_targets() -> None:
    targets = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    loss = loss_of("regression", targets, is_weighted=True)
    torch.testing.assert_close(loss(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), targets), torch.tensor(0.0))
    torch.testing.assert_close(loss(torch.zeros(2, 2), targets), torch.tensor(0.5))


@pytest.mark.parametrize("task", ["survival", "classification"])
def test_a_step_that_computes_cases_again_has_the_gradients_of_all_at_once(task: Task, cohort: Cohort) -> None:
    cases = tuple(LabelledCase(f"c{i}", f"c{i}", (f"slide{i}", f"slide{i + 3}"), None) for i in range(3))
    targets = {
        "survival": torch.tensor([[3.0, 1.0], [1.0, 1.0], [2.0, 0.0]]),
        "classification": torch.tensor([0, 1, 1]),
    }
    labels = Labels(task, cases, targets[task], ("a", "b"))
    encoder = load_slide_encoder(cohort.weights, config=CONFIG)
    paths = {path.stem: path for path in cohort.features.iterdir()}
    files = CaseFiles(paths, encoder.config, small_settings())
    inputs = Inputs(labels=labels, files=files, vectors=None, device=torch.device("cpu"), precision="float32")
    torch.manual_seed(1)
    model = SlideModel(encoder, CONFIG.embed_dim, (1, 2), labels.num_outputs).train()
    loss = loss_of(task, targets[task], is_weighted=True)
    seen: list[int] = []
    kept: list[int] = []
    torch.manual_seed(2)  # of dropout
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one):
        found_loss = loss(inputs.scores(model, [0, 1, 2], seen.append), targets[task])
    assert sum(kept) < 1000  # of the loss alone: nothing of a case stays
    found_loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(2)
    read = [files.read(case) for case in cases]
    loss(torch.cat([model(one.features, one.grid) for one in read]), targets[task]).backward()
    assert seen == [one.num_tiles for one in read]
    for got, parameter in zip(found, model.parameters(), strict=True):
        assert (got is None) == (parameter.grad is None)
        if got is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(got, parameter.grad, rtol=0, atol=1e-6 * float(parameter.grad.abs().max()))


def test_adapters_change_nothing_at_first_train_alone_and_are_merged(tmp_path: Path) -> None:
    model, (features, grid) = model_of(scores=2), tiles(30, 1)
    expected, plain = model(features, grid), {name: value.clone() for name, value in model.state_dict().items()}
    add_adapters(model, 4)
    assert torch.equal(model(features, grid), expected)
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.0, layer_decay=0.5)
    assert sorted({group["lr"] for group in groups}) == [0.0025, 0.005, 0.01]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(features, grid).square().sum().backward()
        optimizer.step()
    trained = model(features, grid)
    merge_adapters(model, tmp_path / "adapter")
    torch.testing.assert_close(model(features, grid), trained, rtol=0, atol=1e-5)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, plain[name])}
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    assert changed == {
        *(f"slide_encoder.encoder.layers.{k}.self_attn.{name}.weight" for k in range(2) for name in projections),
        "classifier.0.weight",
        "classifier.0.bias",
    }
    from peft import PeftModel

    encoder = SlideEncoder(CONFIG)
    encoder.load_state_dict({n.removeprefix("slide_encoder."): v for n, v in plain.items() if n.startswith("slide_")})
    again = PeftModel.from_pretrained(encoder, str(tmp_path / "adapter")).eval()  # type: ignore[arg-type]
    assert model.slide_encoder is not None
    layers = model.slide_encoder(features[None], grid[None], tile_size=1).layers
    torch.testing.assert_close(again(features[None], grid[None], tile_size=1).layers, layers, rtol=0, atol=1e-5)


def test_contributions_add_up_to_the_derivative_along_the_features() -> None:
    model, (features, grid) = model_of(scores=2).double(), tiles(25, 2)
    features = features.double().requires_grad_()
    scores = model(features, grid)[0]
    found = gradient_times_input(scores[1], features)
    assert found.shape == (25,)
    step = 1e-5
    with torch.no_grad():
        more, less = (model(features * (1 + sign * step), grid)[0, 1] for sign in (1, -1))
    assert float(found.sum()) == pytest.approx(float(more - less) / (2 * step), rel=1e-6)
    with pytest.raises(ValueError, match="one number"):
        gradient_times_input(scores, features)
    with pytest.raises(ValueError, match="requires_grad_"):
        gradient_times_input(scores[0].detach(), features)


def test_the_best_epoch_is_the_first_of_the_greatest_metric_and_else_the_last() -> None:
    assert best_epoch([{"a": 0.5}, {"a": 0.7}, {"a": 0.7}, {"a": math.nan}], "a") == 2
    assert best_epoch([{"a": math.nan}, {}], "a") == 2
