"""ResNet18 in its CIFAR form cut into stages: Hugging Face's own basic layers behind a 3x3 stem without pooling.

Block i is layer i % 2 of Hugging Face's stage i // 2. The published cuts, after layer1, layer2 and layer3, are
`pipeline.cuts = [2, 4, 6]`; any other is as good. Every boundary is a ReLU's output.

BatchNorm uses the statistics of a micro-batch, so that these are part of the recipe: another number of micro-batches is
another model in training. Its running statistics, which evaluation uses, advance once a micro-batch.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer, ResNetEncoder, ResNetPreTrainedModel

from thinpipe.harness.errors import UserError
from thinpipe.harness.models._shared import call, materialise, seeded, unset
from thinpipe.harness.models._shared import class_loss as loss
from thinpipe.harness.models.base import ModelShape, StagePart
from thinpipe.harness.spec import ModelSpec

__all__ = ["ResNetStage", "build", "loss", "reference", "stored_names"]

VERSION = 1
SUMMARY = "ResNet18 for 32x32 images (CIFAR form), of Hugging Face's layers; published cuts: pipeline.cuts = [2, 4, 6]"
SOURCE = "He et al. 2016, Deep Residual Learning for Image Recognition; cuts of Rudakov et al. 2023 (arXiv 2401.07788)"
# final: height and width of the last blocks' outputs. Of a block: inputs, channels: it has before and after; side: its
# output's height and width; projected: channels of the projection on its shortcut, 0 = none; stem: channels of the
# stem that runs before it.
PARAMETERS = {
    "kinds": ["images"],
    "presets": {"resnet18": {"width": 64, "final": 4}, "narrow": {"width": 16, "final": 4}},
    "blocks": [
        {"inputs": {"width": 1}, "channels": {"width": 1}, "side": {"final": 8}, "projected": {}, "stem": {"width": 1}},
        {"inputs": {"width": 1}, "channels": {"width": 1}, "side": {"final": 8}, "projected": {}, "stem": {}},
        {"inputs": {"width": 1}, "channels": {"width": 2}, "side": {"final": 4}, "projected": {"width": 2}, "stem": {}},
        {"inputs": {"width": 2}, "channels": {"width": 2}, "side": {"final": 4}, "projected": {}, "stem": {}},
        {"inputs": {"width": 2}, "channels": {"width": 4}, "side": {"final": 2}, "projected": {"width": 4}, "stem": {}},
        {"inputs": {"width": 4}, "channels": {"width": 4}, "side": {"final": 2}, "projected": {}, "stem": {}},
        {"inputs": {"width": 4}, "channels": {"width": 8}, "side": {"final": 1}, "projected": {"width": 8}, "stem": {}},
        {"inputs": {"width": 8}, "channels": {"width": 8}, "side": {"final": 1}, "projected": {}, "stem": {}},
    ],
    "counts": {
        "block": {
            "inputs*channels": 9,
            "channels*channels": 9,
            "channels": 4,
            "inputs*projected": 1,
            "projected": 2,
        },
        "embedding": {"width": 29},
        "head": {"width*num_labels": 8, "num_labels": 1},
    },
    "flops": {
        "block": {
            "side*side*inputs*channels": 9,
            "side*side*channels*channels": 9,
            "side*side*inputs*projected": 1,
            "side*side*stem": 27,
        },
        "head": {"width*num_labels": 8},
    },
    "activations": {
        "block": {"side*side*channels": 4, "side*side*projected": 1},
        "embedding": {"final*final*width": 128, "final*final": 192},
        "head": {"width": 8},
    },
    "boundary": {"shape": ["channels", "side", "side"], "relu": True},
}
# Of each of Hugging Face's stages: its channels in widths, and its layers.
WIDTHS = (1, 2, 4, 8)
DEPTH = 2


class ResNetStage(nn.Module):
    """One stage. forward: images (mb, 3, 32, 32) float32 on the first, a boundary tensor (mb, channels, side, side) on
    the others; returns a boundary tensor, or logits (mb, num_labels) on the last.

    Parameters and buffers are called `stem.*`, `blocks.0.*` to `blocks.7.*` and `classifier.*` at any cut.
    """

    def __init__(self, shape: ModelShape, part: StagePart, *, recompute: bool) -> None:
        super().__init__()
        config = _config(shape)
        self.part, self.recompute = part, recompute
        self.shared: dict[str, list[nn.Parameter]] = {}
        if part.first:
            self.stem = _stem(config)
        stages = ResNetEncoder(config).stages
        blocks = [layer for stage in stages for layers in stage.children() for layer in layers.children()]
        self.blocks = nn.ModuleDict({str(index): blocks[index] for index in part.blocks})
        if part.last:
            self.pooler = nn.AdaptiveAvgPool2d((1, 1))
            self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(shape.width * WIDTHS[-1], shape.num_labels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part.first:
            x = self.stem(x)
        for block in self.blocks.values():
            x = call(block, x, recompute=self.recompute)
        return self.classifier(self.pooler(x)) if self.part.last else x


def build(spec: ModelSpec, shape: ModelShape, part: StagePart, *, seed: int, recompute: bool = False) -> nn.Module:
    """One stage in float32 on the CPU, in training mode, with random weights after Hugging Face's initialisation.

    Each component draws from its own generator, keyed by (seed, its name). A ResNet has no dropout: spec.dropout must
    be 0. Raises UserError otherwise.
    """
    if spec.dropout:
        raise UserError(f"model {spec.name!r} has no dropout: leave model.dropout out.")
    with torch.device("meta"):
        stage = ResNetStage(shape, part, recompute=recompute)
    initialise = ResNetPreTrainedModel(_config(shape))._init_weights
    materialise(stage, initialise)
    seeded(_components(stage), seed, initialise)
    return stage.train()


def reference(spec: ModelSpec, shape: ModelShape) -> nn.Module:
    """The whole ResNetForImageClassification but for the stem, which is ours; its weights unset."""
    config = _config(shape)
    model = unset(ResNetForImageClassification, config)
    model.resnet.embedder = _stem(config)  # type: ignore[union-attr]
    return model


def stored_names(name: str) -> tuple[str, ...]:
    """What `reference` calls a parameter or buffer of a stage."""
    place, _, rest = name.partition(".")
    if place == "blocks":
        index, _, rest = rest.partition(".")
        return (f"resnet.encoder.stages.{int(index) // DEPTH}.layers.{int(index) % DEPTH}.{rest}",)
    return (f"resnet.embedder.{rest}",) if place == "stem" else (name,)


def _config(shape: ModelShape) -> ResNetConfig:
    values = {
        "layer_type": "basic",
        "embedding_size": shape.width,
        "hidden_sizes": [shape.width * factor for factor in WIDTHS],
        "depths": [DEPTH] * len(WIDTHS),
        "num_labels": shape.num_labels,
    }
    return ResNetConfig.from_dict(values)


def _stem(config: ResNetConfig) -> nn.Module:
    return ResNetConvLayer(config.num_channels, config.embedding_size, kernel_size=3, activation=config.hidden_act)


def _components(stage: ResNetStage) -> list[tuple[str, nn.Module]]:
    """What is seeded by itself, with its name: the stem, each block, the classifier."""
    blocks = [(f"blocks.{name}", block) for name, block in stage.blocks.named_children()]
    return [pair for pair in stage.named_children() if pair[0] != "blocks"] + blocks
