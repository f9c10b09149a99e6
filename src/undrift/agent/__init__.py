"""Agents that learn to steer a federation (FedRL); `undrift[rl]` trains them, any run uses them."""

from undrift.agent.episodes import Episodes
from undrift.agent.settings import AgentSettings, load_agent, shipped_agents

__all__ = ["AgentSettings", "Episodes", "load_agent", "shipped_agents"]
