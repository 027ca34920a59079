"""Ask people: the store of their answers, exchange with other tools, the page in the browser, the loop."""
