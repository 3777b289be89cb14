"""Models of pictures and sound of Hugging Face's transformers, from configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from clusterd import train
from tests.foreign.registry import script

SAMPLES = 64
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT = ViTConfig(
    **LAYERS, image_size=16, patch_size=4, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)


class Named(torch.utils.data.Dataset[Any]):
    """Samples of named tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def arguments(model: Any, data: Any, **others: Any) -> dict[str, Any]:
    """Arguments that the scripts of this module have in common; the model computes its loss itself."""
    return {
        "model": model,
        "loss": lambda output, batch: output.loss,
        "data": data,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "global_batch": 8,
        "steps": 12,
        **others,
    }


def labelled() -> Named:
    return Named(
        pixel_values=torch.randn(SAMPLES, 3, 16, 16, generator=drawn()),
        labels=torch.randint(4, (SAMPLES,), generator=drawn()),
    )


@script()
def vit() -> dict[str, Any]:
    """ViT, classification."""
    return arguments(lambda: ViTForImageClassification(VIT), labelled())


class Distilled(nn.Module):
    """A student and its moving average, which is the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = ViTForImageClassification(VIT)
        self.teacher = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.teacher.requires_grad_(False)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.teacher.update_parameters(self.student)
        logits = self.student(pixel_values).logits
        with torch.no_grad():
            aim = self.teacher(pixel_values).logits
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, aim)


@script("dp=2,zero=1", advice="ZeRO up to stage 1")
def vit_average() -> dict[str, Any]:
    """ViT with a moving average of its weights (`swa_utils.AveragedModel`) in the forward pass."""
    return arguments(Distilled, labelled(), loss=lambda output, batch: output)


class DistilledByBuffers(nn.Module):
    """A student, and its moving average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = ViTForImageClassification(VIT)
        self.names = [name for name, _ in self.student.named_parameters()]
        for index, parameter in enumerate(self.student.parameters()):
            self.register_buffer(f"average{index}", parameter.detach().clone())

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        averages = [getattr(self, f"average{index}") for index in range(len(self.names))]
        if self.training:
            with torch.no_grad():
                for average, parameter in zip(averages, self.student.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
        logits = self.student(pixel_values).logits
        with torch.no_grad():
            teacher = {name: average.clone() for name, average in zip(self.names, averages, strict=True)}
            aim = torch.func.functional_call(self.student, teacher, (pixel_values,)).logits
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, aim)


@script("dp=2,zero=1", advice="ZeRO up to stage 1")
def vit_average_in_buffers() -> dict[str, Any]:
    """ViT with a moving average of its weights in buffers."""
    return arguments(DistilledByBuffers, labelled(), loss=lambda output, batch: output)


@script(advice="compare gathered features, as `clip_gathered`")
def clip() -> dict[str, Any]:
    """CLIP, contrastive loss of transformers."""
    return arguments(*clip_and_pairs(return_loss=True))


@script("dp=2,accumulation=2", advice="dp without accumulation")
def clip_gathered() -> dict[str, Any]:
    """CLIP, contrastive loss of features that `train.gather` gathers."""
    model, pairs = clip_and_pairs()

    def contrastive(output: Any, batch: Any) -> torch.Tensor:
        texts, images = train.gather(output.text_embeds), train.gather(output.image_embeds)
        logits, labels = texts @ images.T * 10, torch.arange(len(texts))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return arguments(model, pairs, loss=contrastive)


def clip_and_pairs(**options: Any) -> tuple[Any, Any]:
    """A small CLIP, and pairs of text and picture."""
    text = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 1}
    vision = {**LAYERS, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    data = Named(
        input_ids=torch.randint(3, 64, (SAMPLES, 8), generator=drawn()),
        pixel_values=torch.randn(SAMPLES, 3, 16, 16, generator=drawn()),
    )

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = CLIPModel(config)

        def forward(self, **batch: torch.Tensor) -> Any:
            return self.clip(**batch, **options)

    return Contrastive, data


@script()
def whisper() -> dict[str, Any]:
    """Whisper, transcription."""
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    data = Named(
        input_features=torch.randn(SAMPLES, 8, 32, generator=drawn()),
        labels=torch.randint(3, 64, (SAMPLES, 8), generator=drawn()),
    )
    return arguments(lambda: WhisperForConditionalGeneration(config), data)


@script(advice="nothing: losses differ as between two seeds")
def wav2vec2() -> dict[str, Any]:
    """wav2vec 2.0, CTC loss, masked spans of time."""
    config = Wav2Vec2Config(
        **LAYERS, vocab_size=16, conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, ctc_loss_reduction="mean",
        mask_time_prob=0.2, mask_time_length=2,
    )  # fmt: skip
    data = Named(
        input_values=torch.randn(SAMPLES, 800, generator=drawn()),
        labels=torch.randint(1, 16, (SAMPLES, 5), generator=drawn()),
    )
    return arguments(lambda: Wav2Vec2ForCTC(config), data)
