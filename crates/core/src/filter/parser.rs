//! Parses tokens into an expression.

use super::Node;
use super::error::FilterError;
use super::lexer::{Kind, Token, tokens};
use super::test::{self, Op, Test};
use std::ops::Range;

/// Deepest nesting of parentheses and `not`. It limits the recursion of the parser and of matching.
pub(super) const DEPTH_MAX: usize = 64;

/// Parses a whole expression.
pub(super) fn parse(text: &str) -> Result<Node, FilterError> {
    let mut parser = Parser { tokens: tokens(text)?, next: 0, depth: 0, end: text.len() };
    let node = parser.any()?;
    match parser.peek() {
        None => Ok(node),
        Some(Kind::Close) => Err(parser.wrong("this ')' closes nothing: remove it")),
        Some(_) => Err(parser.wrong("expected 'and' or 'or' here, or the end of the filter")),
    }
}

struct Parser {
    tokens: Vec<Token>,
    next: usize,
    depth: usize,
    /// The length of the text, which is the position of a missing token.
    end: usize,
}

impl Parser {
    fn peek(&self) -> Option<&Kind> {
        self.tokens.get(self.next).map(|token| &token.kind)
    }

    /// Returns the position of the next token, or where it is missing.
    fn here(&self) -> Range<usize> {
        self.tokens.get(self.next).map_or(self.end..self.end, |token| token.at.clone())
    }

    fn wrong(&self, message: impl Into<String>) -> FilterError {
        FilterError::new(self.here(), message)
    }

    fn take(&mut self, kind: &Kind) -> bool {
        let found = self.peek() == Some(kind);
        self.next += usize::from(found);
        found
    }

    fn any(&mut self) -> Result<Node, FilterError> {
        let mut nodes = vec![self.all()?];
        while self.take(&Kind::Or) {
            nodes.push(self.all()?);
        }
        Ok(single(nodes, Node::Any))
    }

    fn all(&mut self) -> Result<Node, FilterError> {
        let mut nodes = vec![self.one()?];
        while self.take(&Kind::And) {
            nodes.push(self.one()?);
        }
        Ok(single(nodes, Node::All))
    }

    fn one(&mut self) -> Result<Node, FilterError> {
        let opened = self.here();
        if self.depth == DEPTH_MAX {
            return Err(self.wrong(format!("nested more than {DEPTH_MAX} deep: write it flatter")));
        }
        self.depth += 1;
        let node = if self.take(&Kind::Not) {
            Node::Not(Box::new(self.one()?))
        } else if self.take(&Kind::Open) {
            let node = self.any()?;
            if !self.take(&Kind::Close) {
                return Err(FilterError::new(opened, "this '(' is not closed: add a ')'"));
            }
            node
        } else {
            Node::Test(self.test()?)
        };
        self.depth -= 1;
        Ok(node)
    }

    fn test(&mut self) -> Result<Test, FilterError> {
        let at = self.here();
        let Some(Kind::Word(name)) = self.peek().cloned() else {
            return Err(self.wrong("expected a field here, such as host, dst, port or reason"));
        };
        let field = test::field(&name, at)?;
        self.next += 1;
        let op_at = self.here();
        let op = self.op(&name)?;
        let values = if op == Op::In { self.list()? } else { vec![self.value()?] };
        Test::new((&name, field), (op, op_at), &values)
    }

    fn op(&mut self, field: &str) -> Result<Op, FilterError> {
        let Some(Kind::Op(op)) = self.peek() else {
            let message = format!("expected an operator after '{field}': == != ~ !~ < <= > >= or in");
            return Err(self.wrong(message));
        };
        let op = *op;
        self.next += 1;
        Ok(op)
    }

    fn value(&mut self) -> Result<(String, Range<usize>), FilterError> {
        let at = self.here();
        match self.peek() {
            Some(Kind::Word(text) | Kind::Quoted(text)) => {
                let text = text.clone();
                self.next += 1;
                Ok((text, at))
            }
            Some(Kind::And | Kind::Or | Kind::Not | Kind::Op(Op::In)) => {
                Err(self.wrong("expected a value here; put a value that is a keyword into quotes"))
            }
            Some(Kind::ListOpen) => Err(self.wrong("a list goes with 'in': write port in [80, 443]")),
            _ => Err(self.wrong("expected a value here")),
        }
    }

    /// Parses one value, or several in brackets.
    fn list(&mut self) -> Result<Vec<(String, Range<usize>)>, FilterError> {
        let opened = self.here();
        if !self.take(&Kind::ListOpen) {
            return Ok(vec![self.value()?]);
        }
        let mut values = vec![self.value()?];
        while self.take(&Kind::Comma) {
            values.push(self.value()?);
        }
        if !self.take(&Kind::ListClose) {
            return Err(match self.peek() {
                None => FilterError::new(opened, "this '[' is not closed: add a ']'"),
                Some(_) => self.wrong("expected ',' or ']' here"),
            });
        }
        Ok(values)
    }
}

fn single(mut nodes: Vec<Node>, several: fn(Vec<Node>) -> Node) -> Node {
    match nodes.pop() {
        Some(node) if nodes.is_empty() => node,
        Some(node) => {
            nodes.push(node);
            several(nodes)
        }
        None => several(nodes),
    }
}
