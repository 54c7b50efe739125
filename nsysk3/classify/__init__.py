"""Kernel names to roles and categories: ordered rules kept as data, and the matcher that applies them."""

from nsysk3.classify.rule import COMM_ROLES, ROLES, Rule
from nsysk3.classify.rules import Explanation, Hit, Match, RuleSet, nccl_op_role

__all__ = ["COMM_ROLES", "ROLES", "Explanation", "Hit", "Match", "Rule", "RuleSet", "nccl_op_role"]
