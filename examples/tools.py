"""You will see a model choose between Python functions, call one with typed arguments, and tell what it returned."""

import niwaki as nw


def get_weather(city: str) -> dict[str, object]:
    """Current weather of a city"""
    return {"sky": "rain", "degrees": 12} if city == "Porto" else {"sky": "fog", "degrees": 9}


def get_price(product: str) -> dict[str, object]:
    """Price of a product"""
    return {"price": {"lamp": 40, "chair": 85}.get(product, 10)}


TOOLS = [get_weather, get_price]


@nw.function
def agent(s, question: str):
    s += nw.system("You can call tools.", tools=TOOLS)
    s += nw.user(question)
    for step in range(3):
        s += nw.assistant(nw.gen(f"step{step}", tools=TOOLS, max_new_tokens=64))
        answer = s[f"step{step}"]
        if isinstance(answer, str):
            return answer
        s += answer.turn(answer.run())
    return None


if __name__ == "__main__":
    for question in ("What is the weather in Porto?", "How much is the lamp?", "Hello"):
        state = agent.run(question=question, temperature=0)
        print(question)
        if not isinstance(state["step0"], str):
            print(f"    {state['step0'].name}({state['step0'].arguments})")
        print(f"    {state.ret_value}")
