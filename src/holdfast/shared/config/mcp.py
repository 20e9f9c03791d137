"""Configuration of MCP servers, whose tools a policy may call."""

from __future__ import annotations

from pydantic import ConfigDict, Field, field_validator, model_validator

from holdfast.shared.config.base import Section
from holdfast.shared.config.urls import check_url


class McpServerConfig(Section):
    """One server: a command that speaks MCP on its standard input and output, or a URL (streamable HTTP)."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a URL may hold a password

    command: str | None = Field(default=None, min_length=1)
    """Program that is started for every rollout that calls one of its tools, and ends with it."""

    args: list[str] = []
    """Its arguments."""

    env: list[str] = []
    """Names of environment variables that it gets beside PATH, HOME, PYTHONPATH and the like; values stay out of the
    settings."""

    url: str | None = None
    """In the place of a command: the endpoint of a server that is there already, such as http://127.0.0.1:9000/mcp;
    every rollout has a session of its own."""

    api_key_env: str | None = None
    """With `url`: environment variable with its key; unset: none is sent."""

    tools: list[str] | None = Field(default=None, min_length=1)
    """Which of its tools the policy sees; unset: all."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the server may take to answer when it is begun, and at the start of the run to name its tools."""

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str | None) -> str | None:
        if url is not None:
            check_url(url)
        return url

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServerConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("set `command`, or `url`, and not both")
        if self.url is not None and (self.args or self.env):
            raise ValueError("args and env belong to a `command`; a server at a `url` has its own")
        if self.command is not None and self.api_key_env is not None:
            raise ValueError("api_key_env belongs to a `url`; give a command its key with `env`")
        return self
