# Two commands for people: `make demo` and `make test`. Both install what the build needs and is missing.
CARGO_ENV = if [ -f "$${CARGO_HOME:-$$HOME/.cargo}/env" ]; then . "$${CARGO_HOME:-$$HOME/.cargo}/env"; fi

.PHONY: demo test recording setup

demo: setup
	@$(CARGO_ENV); cargo build --release --locked
	@echo '$$ qrun -p "Tell me a story about a fox named Pip."' >&2
	@./target/release/qrun -p "Tell me a story about a fox named Pip." --seed 1 --stats </dev/null

test: setup
	@$(CARGO_ENV); cargo test --workspace --locked

# The pictures in docs/, drawn by the interface's own code.
recording: setup
	@$(CARGO_ENV); cargo run -q -p tui --example recording --locked -- docs

setup:
	@sh .ci/setup
