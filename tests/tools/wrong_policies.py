"""Policies that compute something else, for the tests of `verify`: each plants one fault that shapes do not show."""

from colonnade.comm.regions import reduce_from_region
from colonnade.shardformer import col, head_norm, row
from colonnade.shardformer.layer import Linear1D_Col, Linear1D_Row
from colonnade.shardformer.layer.sharding import shard_parameter
from colonnade.shardformer.policies.llama import HEADS, LlamaPolicy
from colonnade.shardformer.policies.opt import OPTPolicy


class RightLlama(LlamaPolicy):
    """Nothing is wrong with it."""


class KeysCutOtherwise(LlamaPolicy):
    """k_proj gives a rank half of each half of the heads, where q_proj and v_proj give it the first half."""

    def module_policy(self):
        attention = col("q_proj", "v_proj", units=HEADS) + col("k_proj", pieces=2) + row("o_proj", units=HEADS)
        return super().module_policy() | {f"{self.family}Attention": attention}


class BiasOnEachRank(Linear1D_Row):
    """Adds its bias before the sum, so as often as there are ranks."""

    def _summed(self, y_BSD):
        return reduce_from_region(y_BSD + self.bias, self.axis)


class BiasTooOften(OPTPolicy):
    def module_policy(self):
        rules = super().module_policy()
        for rule in rules["OPTDecoderLayer"].sub_module_replacement:
            if rule.suffix == "fc2":
                rule.target_module = BiasOnEachRank
        return rules


class GradientNotReduced(Linear1D_Row):
    """Halves what goes back into its region; what comes out of it is right."""

    def forward(self, x_BSf):
        return super().forward(x_BSf * 0.5 + (x_BSf * 0.5).detach())


class WrongGradient(LlamaPolicy):
    def module_policy(self):
        rules = super().module_policy()
        for rule in rules[f"{self.family}MLP"].sub_module_replacement:
            if rule.suffix == "down_proj":
                rule.target_module = GradientNotReduced
        return rules


class KeysNotSummed(Linear1D_Col):
    """Keys and values that several ranks hold get the gradient of this rank's query heads only."""

    def _cut(self, ranges, weight_dim):
        for param, dim in ((self.weight, weight_dim), (self.bias, 0)):
            if param is not None:
                shard_parameter(param, dim, ranges, self.axis)


class SharedKeysForgotten(LlamaPolicy):
    def module_policy(self):
        rules = super().module_policy()
        for rule in rules[f"{self.family}Attention"].sub_module_replacement:
            if rule.suffix in ("k_proj", "v_proj"):
                rule.target_module = KeysNotSummed
        return rules


class HeadNormsForgotten(LlamaPolicy):
    """The norms inside the heads get the gradient of this rank's heads only."""

    def module_policy(self):
        attention = col("q_proj", "k_proj", "v_proj", units=HEADS) + row("o_proj", units=HEADS)
        return super().module_policy() | {f"{self.family}Attention": attention}


class Misspelled(LlamaPolicy):
    def module_policy(self):
        return super().module_policy() | {f"{self.family}Attention": col("q_prj") + head_norm("q_norm", optional=True)}
