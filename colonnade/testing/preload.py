"""Imported once, by the server that ranks are forked from, so that no rank pays for these imports itself."""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.mixtral.modeling_mixtral
import transformers.models.opt.modeling_opt
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

torch.set_num_threads(1)  # ranks forked from a process with a thread pool hang in their first parallel operation
