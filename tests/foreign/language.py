"""Language models of Hugging Face's transformers, from configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.foreign.registry import script

VOCABULARY, LENGTH, SAMPLES = 64, 12, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
BERT = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}


class Texts(torch.utils.data.Dataset[Any]):
    """Tokenized texts as a tokenizer's collator gives them: token ids and labels."""

    def __init__(self, *, masked: bool = False) -> None:
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=random)
        self.labels = self.tokens.clone()
        if masked:  # a different number of words in each text
            shares = torch.rand(SAMPLES, 1, generator=random)
            hidden = torch.rand(SAMPLES, LENGTH, generator=random) < shares
            hidden[:, 0] = True
            self.tokens = self.tokens.where(~hidden, 2)
            self.labels = self.labels.where(hidden, -100)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def arguments(model: Any, **others: Any) -> dict[str, Any]:
    """Arguments that the scripts of this module have in common; the model computes its loss itself."""
    return {
        "model": model,
        "loss": lambda output, batch: output.loss,
        "data": Texts(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "global_batch": 8,
        "steps": 12,
        **others,
    }


@script("tp=2")
def llama() -> dict[str, Any]:
    """Llama, the loss of transformers, its own `tp_plan`."""
    plan = {f"model.{name}": style for name, style in LlamaConfig.base_model_tp_plan.items()}
    return arguments(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), tp_plan=plan)


@script()
def mixtral() -> dict[str, Any]:
    """Mixtral: mixture of experts."""
    return arguments(
        lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    )


@script()
def mixtral_balanced() -> dict[str, Any]:
    """Mixtral with its load-balancing loss."""
    return arguments(
        lambda: MixtralForCausalLM(
            MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
        ),
    )


@script()
def t5() -> dict[str, Any]:
    """T5: encoder and decoder."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return arguments(lambda: T5ForConditionalGeneration(config))


def bert() -> torch.nn.Module:
    return BertForMaskedLM(BertConfig(**BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


@script(advice="return (sum, weight)")
def bert_masked() -> dict[str, Any]:
    """BERT on masked words, the loss of transformers."""
    return arguments(bert, data=Texts(masked=True))


@script()
def bert_masked_weighted() -> dict[str, Any]:
    """BERT on masked words, a loss of (sum, weight)."""

    def loss(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch["labels"].flatten()
        total = F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum")
        return total, (labels != -100).sum()

    return arguments(bert, loss=loss, data=Texts(masked=True))


@script(advice="nothing: losses differ as between two seeds")
def bert_dropout() -> dict[str, Any]:
    """BERT with its dropout."""
    return arguments(lambda: BertForMaskedLM(BertConfig(**BERT)))


@script()
def lora() -> dict[str, Any]:
    """LoRA by peft, on a frozen Llama."""

    def model() -> torch.nn.Module:
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), lora)

    return arguments(model)
